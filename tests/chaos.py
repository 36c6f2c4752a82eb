"""Jobs with random phases over shadowed contents, and a hand that kills and stops them and their broker at random.

Not a test itself: tests/test_chaos.py runs it for seconds, bench/chaos.py for thousands of handoffs.
"""

from __future__ import annotations

import os
import random
import select
import signal
import time
from dataclasses import dataclass, field
from typing import Any

from pymux.errors import BrokerLost
from tests.conftest import hear

PAGES = {"weights": 5, "optimizer": 6}
PATIENCE = 60.0  # seconds without a turn of a job that is neither stopped nor just started, before it hangs
STARTING = 10.0  # seconds for a process and its imports

WORKER = """
import random
rng = random.Random(int(os.environ["SEED"]))
mux = pymux.connect(os.environ["NAME"])
sizes = json.loads(os.environ["PAGES"])
regions = {"weights": mux.region("weights"), "optimizer": mux.region("optimizer", track="fingerprint")}
blocks, shadow = {}, {}
with mux.phase("init"):
    for n, pages in sizes.items():
        blocks[n] = regions[n].allocate(pages * PAGE)
        for i in range(pages):
            shadow[n, i] = rng.randbytes(64)
            ctypes.memmove(blocks[n].ptr + i * PAGE + 4096, shadow[n, i], 64)
say("ready")
turn = 0
def verify(names):
    for n in names:
        for i in range(sizes[n]):
            got = ctypes.string_at(blocks[n].ptr + i * PAGE + 4096, 64)
            assert got == shadow[n, i], f"{n} page {i} of turn {turn} differs"
while True:
    uses = rng.choice([("weights",), ("optimizer",), ("weights", "optimizer")])
    writes = [n for n in uses if rng.random() < 0.5]
    lazy = [n for n in uses if rng.random() < 0.3]
    try:
        with mux.phase("p", uses=uses, writes=writes, lazy=lazy) as lease:
            for n in lazy:
                lease.require(n)
            verify(uses)
            for n in writes:
                for i in range(sizes[n]):
                    shadow[n, i] = rng.randbytes(64)
                    ctypes.memmove(blocks[n].ptr + i * PAGE + 4096, shadow[n, i], 64)
            if rng.random() < 0.2:
                lease.yield_point()
                verify(set(uses) - set(lazy))
            if rng.random() < 0.1:
                with lease.idle(expect=0.002):
                    time.sleep(0.001)
                verify(set(uses) - set(lazy))
            for n in writes:
                if rng.random() < 0.2:
                    lease.done_with(n)
            if rng.random() < 0.3:  # what is looked at, and no more
                start = blocks["weights"].ptr - regions["weights"].base
                live = [(start + i * PAGE + 4096, 64) for i in range(sizes["weights"])]
                regions["weights"].set_live(rng.choice([None, live]))
    except pymux.LeaseFenced:  # stopped for too long in a phase that lacked pages
        pass
    turn += 1
    say(mux.stats()["grants"])
    time.sleep(rng.random() * 0.004)
"""


@dataclass
class Outcome:
    """What happened."""

    handoffs: int = 0
    turns: int = 0
    kills: int = 0
    stops: int = 0
    brokers: int = 0
    seconds: float = 0.0
    longest_wait: float = 0.0
    ends: dict[str, int] = field(default_factory=dict)  # grants of each job's process, as last told


class Chaos:
    """Jobs on a node."""

    def __init__(self, node: Any, seed: int, jobs: int) -> None:
        self.node = node
        self.rng = random.Random(seed)
        self.odds = [3, 3, 2]  # of a kill, a stop, a broker's death
        self.outcome = Outcome()
        self.stopped: dict[str, float] = {}  # until when
        self.last: dict[str, float] = {}
        self.jobs = {f"job{i}": self.start(f"job{i}", i) for i in range(jobs)}

    def start(self, name: str, seed: int) -> Any:
        import json

        p = self.node.start(WORKER, NAME=name, SEED=str(seed), PAGES=json.dumps(PAGES))
        self.last[name] = time.monotonic() + STARTING
        return p

    def run(self, *, handoffs: int = 10**9, seconds: float = 1e9, every: float = 0.5) -> Outcome:
        """Go on until there were so many handoffs, or for so long; harm somebody about `every` seconds."""
        began = time.monotonic()
        harm_at = began + STARTING / 4
        while self.outcome.handoffs < handoffs and time.monotonic() - began < seconds:
            self.listen()
            self.let_go()
            now = time.monotonic()
            slow = {n: now - t for n, t in self.last.items() if n not in self.stopped and now - t > PATIENCE}
            assert not slow, f"{slow} hang after {self.outcome}: {self.state()}"
            if now > harm_at:
                harm_at = now + every * (0.5 + self.rng.random())
                self.harm()
        self.outcome.seconds = time.monotonic() - began
        return self.outcome

    def state(self) -> str:
        log = self.node.runtime / "broker.log"
        told = log.read_text()[-1500:] if log.exists() else ""
        try:
            return f"{self.node.status()}\n{told}"
        except BrokerLost as e:
            return f"{e}\n{told}"

    def listen(self) -> None:
        pipes = {p.stdout.fileno(): name for name, p in self.jobs.items() if name not in self.stopped}
        for fd in select.select(list(pipes), [], [], 0.02)[0]:
            name, now = pipes[fd], time.monotonic()
            line = hear(self.jobs[name])  # fails with the job's stderr when it ended
            if line != "ready":
                self.outcome.turns += 1
                self.outcome.handoffs += int(line) - self.outcome.ends.get(name, 0)
                self.outcome.ends[name] = int(line)
                self.outcome.longest_wait = max(self.outcome.longest_wait, now - self.last[name])
            self.last[name] = now

    def harm(self) -> None:
        name = self.rng.choice(sorted(set(self.jobs) - set(self.stopped)))
        match self.rng.choices(["kill", "stop", "broker"], self.odds)[0]:
            case "broker":
                self.outcome.brokers += 1
                os.kill(self.node.until(lambda s: s["pid"])["pid"], signal.SIGKILL)
            case "stop" if len(self.stopped) + 1 < len(self.jobs):
                self.outcome.stops += 1
                self.jobs[name].send_signal(signal.SIGSTOP)
                self.stopped[name] = time.monotonic() + self.rng.choice([0.05, 0.3, 2.5])
            case _:
                self.outcome.kills += 1
                self.kill(name)
                self.outcome.ends.pop(name, None)
                self.jobs[name] = self.start(name, self.rng.randrange(1 << 30))

    def let_go(self) -> None:
        for name, until in list(self.stopped.items()):
            if time.monotonic() > until:
                del self.stopped[name]
                self.jobs[name].send_signal(signal.SIGCONT)
                now = time.monotonic()
                for other in self.last:  # a stopped process may have held pages that others waited for
                    self.last[other] = max(self.last[other], now)

    def kill(self, name: str) -> None:
        p = self.jobs.pop(name)
        p.kill()
        p.wait()
        self.node.processes.remove(p)
        for pipe in (p.stdin, p.stdout, p.stderr):
            pipe.close()

    def close(self) -> None:
        """End all jobs."""
        for name in list(self.jobs):
            self.kill(name)
