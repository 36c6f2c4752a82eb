"""How long a lease takes to change hands when no page has to move, beside what people use instead.

All contenders run the same loop in two processes: ask, hold for some milliseconds, give back, stay away for a while,
so that the other one always waits by then. A handoff is from the moment before the holder gives back to the moment
when the waiting process has it. The yardstick is the raw round: one SOCK_SEQPACKET message from a process
to a second that passes it to a third, all in Python, with the same pauses in between.

Contenders whose package or server is missing are left out: --peers takes a Python that has redis, grpcio and ray.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

HOLD, AWAY = 0.010, 0.007  # seconds; who is back within 5 ms would be taken to go on
LOOP_KINDS = ("flock", "semaphore", "redis", "grpc", "ray")


Contender = tuple[Callable[[], Any], Callable[[], Any]]  # acquire, release


def now() -> float:
    return time.clock_gettime(time.CLOCK_MONOTONIC)


# ---- contenders: each makes (acquire, release) -------------------------------------------------------


def with_pymux(_: str) -> Contender:
    import pymux

    mux = pymux.connect(os.environ["BENCH_NAME"])
    phase = [None]

    def acquire() -> None:
        phase[0] = mux.phase("p")
        phase[0].__enter__()

    return acquire, lambda: phase[0].__exit__(None, None, None)


def with_flock(at: str) -> Contender:
    fd = os.open(at + ".lock", os.O_RDWR | os.O_CREAT)
    return lambda: fcntl.flock(fd, fcntl.LOCK_EX), lambda: fcntl.flock(fd, fcntl.LOCK_UN)


def with_semaphore(at: str) -> Contender:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.sem_open.restype = ctypes.c_void_p
    sem = ctypes.c_void_p(libc.sem_open(("/" + Path(at).name).encode(), os.O_CREAT, 0o600, 1))
    return lambda: libc.sem_wait(sem), lambda: libc.sem_post(sem)


def with_redis(at: str) -> Contender:
    import redis

    lock = redis.Redis(unix_socket_path=at + ".redis").lock("device", timeout=30)
    return lock.acquire, lock.release


def with_grpc(at: str) -> Contender:
    import grpc

    channel = grpc.insecure_channel(f"unix:{at}.grpc")
    acquire = channel.unary_unary("/lease/acquire")
    release = channel.unary_unary("/lease/release")
    return lambda: acquire(b""), lambda: release(b"")


def with_ray(at: str) -> Contender:
    os.environ["RAY_AUTH_MODE"] = "disabled"
    import ray

    ray.init(address=Path(at + ".ray").read_text(), namespace="bench", log_to_driver=False, logging_level="ERROR")
    lease = ray.get_actor("lease")
    return lambda: ray.get(lease.acquire.remote()), lambda: ray.get(lease.release.remote())


def serve_grpc(at: str) -> None:
    """Acquire and yield, as a coordinator written in an afternoon has them."""
    import threading
    from concurrent import futures

    import grpc

    lock = threading.Semaphore(1)

    class Lease(grpc.GenericRpcHandler):
        def service(self, details: Any) -> Any:
            def call(*_: Any) -> bytes:
                lock.acquire() if details.method.endswith("acquire") else lock.release()
                return b""

            return grpc.unary_unary_rpc_method_handler(call)

    server = grpc.server(futures.ThreadPoolExecutor(8))
    server.add_generic_rpc_handlers((Lease(),))
    server.add_insecure_port(f"unix:{at}.grpc")
    server.start()
    print("ready", flush=True)
    server.wait_for_termination()


def serve_ray(at: str) -> None:
    import asyncio

    os.environ["RAY_AUTH_MODE"] = "disabled"
    import ray

    context = ray.init(num_cpus=2, include_dashboard=False, namespace="bench", logging_level="ERROR")

    @ray.remote(num_cpus=0)
    class Lease:
        def __init__(self) -> None:
            self.lock = asyncio.Semaphore(1)

        async def acquire(self) -> None:
            await self.lock.acquire()

        async def release(self) -> None:
            self.lock.release()

    keep = Lease.options(name="lease").remote()
    Path(at + ".ray").write_text(context.address_info["gcs_address"])
    print("ready", flush=True)
    signal.pause()
    del keep


def serve_redis(at: str) -> None:
    os.execvp("redis-server", ["redis-server", "--port", "0", "--unixsocket", at + ".redis", "--save", ""])


# ---- processes of the bench --------------------------------------------------------------------------


def loop(kind: str, at: str, turns: int) -> None:
    """Print [asked, entered, left] for each turn."""
    acquire, release = globals()[f"with_{kind}"](at)
    print("ready", flush=True)
    sys.stdin.readline()
    rows = []
    for _ in range(turns):
        asked = now()
        acquire()
        entered = now()
        time.sleep(HOLD)
        left = now()
        release()
        rows.append((asked, entered, left))
        time.sleep(AWAY)
    print(json.dumps(rows), flush=True)


def relay(at: str) -> None:
    """The process in the middle of the raw round."""
    server = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    server.bind(at + ".raw")
    server.listen(2)
    print("ready", flush=True)
    ends = [server.accept()[0] for _ in range(2)]
    for turn in range(sys.maxsize):
        message = ends[turn % 2].recv(4096)
        if not message:
            return
        ends[1 - turn % 2].send(message)


def raw(at: str, turns: int, first: bool) -> None:
    """Print [sent, received] of every message."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    sock.connect(at + ".raw")
    print("ready", flush=True)
    sys.stdin.readline()
    rows = []
    for _ in range(turns):
        if not first:
            sock.recv(4096)
            got = now()
        else:
            got, first = 0.0, False
        time.sleep(HOLD)
        sent = now()
        sock.send(b"x" * 100)
        rows.append((sent, got))
    print(json.dumps(rows), flush=True)


def holder(mib: int) -> None:
    """Hold the device, with so much memory in it, until killed."""
    import pymux

    mux = pymux.connect("holder")
    with mux.phase("hold"):
        block = mux.region("weights").allocate(mib << 20)
        print("ready", flush=True)
        signal.pause()
        del block


# ---- the bench ---------------------------------------------------------------------------------------


class Process:
    """One of the bench's processes, which talks in lines."""

    def __init__(self, python: str, *argv: object, **env: str) -> None:
        command = [python, str(Path(__file__).resolve()), *map(str, argv)]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
            env={**os.environ, **env},
        )  # fmt: skip

    def hear(self) -> str:
        line = self.process.stdout.readline().strip()
        if not line:
            raise ProcessLookupError(self.process.args)
        return line

    def say(self) -> None:
        self.process.stdin.write("go\n")
        self.process.stdin.flush()

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        self.process.stdin.close()
        self.process.stdout.close()


def handoffs(kind: str, at: str, turns: int, python: str) -> list[float]:
    """Seconds from each give-back to the entry of the one who waited for it."""
    with contextlib.ExitStack() as stack:

        def start(*argv: object, **env: str) -> Process:
            p = Process(python, *argv, **env)
            stack.callback(p.close)
            return p

        if kind in {"grpc", "ray", "redis"}:
            server = start("serve", kind, at)
            if kind == "redis":
                deadline = now() + 5
                while not Path(at + ".redis").exists():
                    if server.process.poll() is not None or now() > deadline:
                        raise FileNotFoundError("redis-server")
                    time.sleep(0.05)
            else:
                server.hear()
        workers = [start("loop", kind, at, turns, BENCH_NAME=f"job{i}") for i in range(2)]
        for w in workers:
            w.hear()
        for w in workers:
            w.say()
        rows = [json.loads(w.hear()) for w in workers]
    left = sorted((left, i) for i in range(2) for _, _, left in rows[i])
    out = []
    for i in range(2):
        for asked, entered, _ in rows[i]:
            before = [t for t, who in left if who != i and asked < t <= entered]
            if before:  # it waited for that one
                out.append(entered - before[-1])
    return out


def raw_round(at: str, turns: int) -> list[float]:
    """The same through three processes that do nothing else."""
    ps = [Process(sys.executable, "relay", at)]
    try:
        ps[0].hear()
        for first in (1, 0):
            ps.append(Process(sys.executable, "raw", at, turns, first))
            ps[-1].hear()
        for p in ps[2:0:-1]:
            p.say()
        rows = [json.loads(p.hear()) for p in ps[1:]]
    finally:
        for p in ps:
            p.close()
    a, b = rows
    there = [got - sent for (sent, _), (_, got) in zip(a, b, strict=True)]
    back = [got - sent for (sent, _), (_, got) in zip(b, a[1:], strict=False)]
    return there + back


def reentries(turns: int) -> list[float]:
    """Leave and enter again, while nobody waits."""
    import pymux

    out = []
    with pymux.connect("alone") as mux:
        with mux.phase("p"):
            pass
        phase = mux.phase("p")
        phase.__enter__()
        for _ in range(turns):
            begin = now()
            phase.__exit__(None, None, None)
            phase.__enter__()
            out.append(now() - begin)
        phase.__exit__(None, None, None)
    return out


def yield_points(turns: int) -> float:
    """Seconds of a yield point where nothing is to be done."""
    import pymux

    with pymux.connect("alone") as mux, mux.phase("p") as lease:
        begin = now()
        for _ in range(turns):
            lease.yield_point()
        return (now() - begin) / turns


def reclaims(times: int, mib: int) -> list[float]:
    """From the SIGKILL of the holder to the entry of the one who waits.

    The kernel takes a process's memory apart before it closes its sockets, and the simulated device's memory is
    memory of the process.
    """
    import threading

    import pymux

    out = []
    with pymux.connect("heir") as mux:
        with mux.phase("p"):
            block = mux.region("small").allocate(4 << 20)
        for _ in range(times):
            p = Process(sys.executable, "holder", mib)
            p.hear()
            entered: list[float] = []

            def wait(entered: list[float] = entered) -> None:
                with mux.phase("p"):
                    entered.append(now())

            thread = threading.Thread(target=wait)
            thread.start()
            time.sleep(0.05)
            killed = now()
            p.process.kill()
            thread.join()
            out.append(entered[0] - killed)
            p.close()
        del block
    return out


def quantile(values: list[float], q: float) -> float:
    return sorted(values)[min(len(values) - 1, int(q * len(values)))]


def device_name() -> str:
    from pymux import _core, config

    _core.load_driver(config.load().driver)
    return _core.Device(0).name


def main() -> None:
    from common import arguments, node, publish, result

    args = arguments(
        __doc__,
        turns={"type": int, "default": 1000},
        kills={"type": int, "default": 15},
        peers={"default": sys.executable, "help": "a Python that has redis, grpcio and ray"},
    )
    results = []
    with node(PYMUX_SIM_CAPACITY="512M") as home:
        again = reentries(20000)
        results += [
            result("parked_reenter_p50_us", statistics.median(again) * 1e6, "us", at_most=5),
            result("parked_reenter_p99_us", quantile(again, 0.99) * 1e6, "us"),
            result("yield_point_us", yield_points(200000) * 1e6, "us", at_most=1),
        ]
        raws = raw_round(str(home / "a"), args.turns)
        ours = handoffs("pymux", str(home / "b"), args.turns, sys.executable)
        raws += raw_round(str(home / "c"), args.turns)  # before and after: the machine's mood changes
        for name, values in (("raw", raws), ("handoff", ours)):
            results += [
                result(f"{name}_{p}_us", quantile(values, q) * 1e6, "us") for p, q in (("p50", 0.5), ("p99", 0.99))
            ]
        for p, q, most in (("p50", 0.5, 2), ("p99", 0.99, 5)):
            results.append(result(f"handoff_vs_raw_{p}", quantile(ours, q) / quantile(raws, q), "x", at_most=most))
        for kind in LOOP_KINDS:
            try:
                turns = args.turns if kind in {"flock", "semaphore"} else min(args.turns, 200)
                values = handoffs(kind, str(home / kind), turns, args.peers)
            except (OSError, ProcessLookupError) as e:
                print(f"{kind} is left out: {type(e).__name__}: {e}", file=sys.stderr)
                continue
            results += [
                result(f"{kind}_{p}_us", quantile(values, q) * 1e6, "us") for p, q in (("p50", 0.5), ("p99", 0.99))
            ]
        for mib, metric, most in ((2, "reclaim_p50_ms", 20), (64, "reclaim_of_64_mib_p50_ms", None)):
            killed = statistics.median(reclaims(args.kills, mib))
            results.append(result(metric, killed * 1e3, "ms", at_most=most))
    publish("latency", device_name(), results, args.json)


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["loop", kind, at, turns]:
            loop(kind, at, int(turns))
        case ["relay", at]:
            relay(at)
        case ["raw", at, turns, first]:
            raw(at, int(turns), first == "1")
        case ["holder", mib]:
            holder(int(mib))
        case ["serve", kind, at]:
            globals()[f"serve_{kind}"](at)
        case _:
            main()
