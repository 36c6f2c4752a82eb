"""A broker under load, and what policies give to jobs.

- 1,000 clients on 64 simulated devices, each asking again as soon as it has given back, speak the protocol from one
  process; nothing has to move. Grants a second, and the broker's memory.
- Three real jobs with weights 1:2:4 that always want the device: their device time under ``fair``.
- Three jobs of recorded durations (bench/workloads) that share a trainer's device, in virtual time: the worst
  slowdown under ``fair`` against that under ``fifo``.
"""

from __future__ import annotations

import json
import os
import select
import socket
import subprocess
import sys
import time
from pathlib import Path

from common import ROOT, arguments, node, publish, result

from pymux import policy, wire
from pymux.plan import Phase, Work, simulate

WORKLOADS = ("verl-async-hotpotqa-3b-s0", "verl-async-longcot-1.5b-s0", "verl-sync-7b")

WEIGHED = """
import json, sys, time, pymux
mux = pymux.connect(sys.argv[1])
print("ready", flush=True)
sys.stdin.readline()
end = time.monotonic() + float(sys.argv[2])
spent = 0.0
while time.monotonic() < end:
    with mux.phase("p"):
        begin = time.monotonic()
        time.sleep(0.02)
        spent += time.monotonic() - begin
print(spent, flush=True)
"""


def start_broker(home: Path, *options: str) -> subprocess.Popen:
    """Run a broker of our own, for its options and its memory."""
    command = [sys.executable, "-m", "pymux.cli", "broker", "--linger", "0", *options]
    process = subprocess.Popen(command, cwd=ROOT)
    while not (home / "run" / "broker.sock").exists():
        time.sleep(0.01)
    return process


def load(home: Path, clients: int, devices: int, seconds: float) -> tuple[float, float]:
    """Grants a second, and the broker's resident MiB, with everybody always asking."""
    from pymux import _core, config

    _core.load_driver(config.load().driver)
    uuids = [_core.Device(i).uuid for i in range(devices)]
    broker = start_broker(home)
    poll = select.epoll()
    socks: dict[int, socket.socket] = {}
    for i in range(clients):
        s = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        s.connect(str(home / "run" / "broker.sock"))
        hello = {"version": wire.VERSION, "world": 1, "page_size": 2 << 20, "uuid": uuids[i % devices]}
        s.send(wire.encode("hello", job=f"job{i}", client="main", group="main", **hello))
        name, m = wire.decode(s.recv(4096))
        assert name == "welcome", m
        socks[s.fileno()] = s
        poll.register(s, select.EPOLLIN)
    acquire = wire.encode("acquire", seq=1, phase="p")
    types = {wire.encode(name)[:2]: name for name in ("grant", "recall")}
    body = len(wire.encode("ping"))  # a header
    generation = dict.fromkeys(socks, b"")
    ready = {n: wire.encode(n, generation=0) for n in ("ready", "release")}

    def say(fd: int, name: str) -> None:
        packet = ready[name]
        socks[fd].send(packet[:body] + generation[fd] + packet[body + 8 :])

    for s in socks.values():
        s.send(acquire)
    grants, counting, begin = 0, False, time.monotonic()
    deadline = begin + 1.0  # to get going
    while True:
        for fd, _ in poll.poll(1.0):
            packet = socks[fd].recv(4096)
            match types.get(packet[:2]):
                case "grant":
                    grants += 1
                    generation[fd] = packet[body + 8 : body + 16]
                    say(fd, "ready")
                case "recall":
                    if packet[body : body + 8] == generation[fd]:
                        say(fd, "release")
                        generation[fd] = b""
                        socks[fd].send(acquire)
                case None:
                    pass
        now = time.monotonic()
        if now >= deadline:
            if counting:
                break
            grants, counting, begin, deadline = 0, True, now, now + seconds
    rate = grants / (time.monotonic() - begin)
    status = Path(f"/proc/{broker.pid}/status").read_text()
    rss = int(next(line for line in status.splitlines() if line.startswith("VmRSS")).split()[1]) / 1024
    for s in socks.values():
        s.close()
    broker.terminate()
    broker.wait()
    return rate, rss


def shares(home: Path, seconds: float) -> dict[int, float]:
    """Device seconds of three real jobs, by weight."""
    weights = (1, 2, 4)
    options = [o for w in weights for o in ("--job", f"job{w}:weight={w}")]
    broker = start_broker(home, "--policy", "fair", *options)
    jobs = [
        subprocess.Popen(
            [sys.executable, "-c", WEIGHED, f"job{w}", str(seconds)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT,
        )
        for w in weights
    ]  # fmt: skip
    for j in jobs:
        j.stdout.readline()
    for j in jobs:
        j.stdin.write("go\n")
        j.stdin.flush()
    out = {w: float(j.stdout.readline()) for w, j in zip(weights, jobs, strict=True)}
    for j in jobs:
        j.communicate()
    broker.terminate()
    broker.wait()
    return out


def trainer(name: str) -> Work:
    """A job whose trainer shares a device, and whose rollouts run elsewhere."""
    recorded = json.loads((ROOT / "bench" / "workloads" / f"{name}.json").read_text())
    steps = [
        [
            Phase(name="elsewhere", seconds=sum(v for k, v in step.items() if k != "update_actor"), device=False),
            Phase(name="update_actor", seconds=step["update_actor"]),
        ]
        for step in recorded["steps"]
    ]
    return Work(job=name, steps=steps, pages=60)


def main() -> None:
    args = arguments(
        __doc__,
        clients={"type": int, "default": 1000},
        devices={"type": int, "default": 64},
        seconds={"type": float, "default": 10.0},
    )
    with node(PYMUX_SIM_DEVICES=str(args.devices), PYMUX_SIM_CAPACITY="64M") as home:
        rate, rss = load(home, args.clients, args.devices, args.seconds)
    with node(PYMUX_SIM_DEVICES="1") as home:
        spent = shares(home, 2 * args.seconds)
    total = sum(spent.values())
    off = max(abs(spent[w] / total / (w / 7) - 1) for w in spent)
    worst = {}
    for name in ("fifo", "fair"):
        jobs = [trainer(n) for n in WORKLOADS]
        # 60 pages each of 100, 2 s to swap a job, as PEERS' replay assumes; a day.
        out = simulate(jobs, policy.make(name, 3600.0), pages=100, page_seconds=2 / 60, until=86400.0)
        worst[name] = max(o.slowdown for o in out.values())
    results = [
        result("grants_per_s", rate, "1/s", at_least=3000),
        result("broker_rss_mib", rss, "MiB", at_most=150),
        *(result(f"share_of_weight_{w}", spent[w] / total, "") for w in spent),
        result("weights_off_by", off, "", at_most=0.10),
        *(result(f"worst_slowdown_{n}", v, "x") for n, v in worst.items()),
        result("fair_vs_fifo_worst_slowdown", worst["fair"] / worst["fifo"], "x", at_most=0.75),
    ]
    publish("scale", "simulated", results, args.json)


if __name__ == "__main__":
    os.environ.setdefault("PYMUX_DRIVER", "sim")
    main()
