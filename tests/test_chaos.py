"""Jobs and brokers killed at random during handoffs: nobody else loses a byte or hangs.

The long form, with more kinds of harm, is a bench; this is the short one for every test run.
"""

import os
import random
import signal
import time

import pytest

from tests.conftest import hear

WORKER = """
import random
rng = random.Random(int(os.environ["SEED"]))
mux = pymux.connect(os.environ["NAME"])
sizes = {"weights": 5, "optimizer": 6}
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
while True:
    uses = rng.choice([("weights",), ("optimizer",), ("weights", "optimizer")])
    writes = [n for n in uses if rng.random() < 0.5]
    lazy = [n for n in uses if rng.random() < 0.3]
    with mux.phase("p", uses=uses, writes=writes, lazy=lazy) as lease:
        for n in uses:
            if n in lazy:
                lease.require(n)
            for i in range(sizes[n]):
                got = ctypes.string_at(blocks[n].ptr + i * PAGE + 4096, 64)
                assert got == shadow[n, i], f"{n} page {i} of turn {turn} differs"
        for n in writes:
            for i in range(sizes[n]):
                shadow[n, i] = rng.randbytes(64)
                ctypes.memmove(blocks[n].ptr + i * PAGE + 4096, shadow[n, i], 64)
            if rng.random() < 0.2:
                lease.done_with(n)
        if rng.random() < 0.3:  # what is looked at, and no more
            start = blocks["weights"].ptr - regions["weights"].base
            live = [(start + i * PAGE + 4096, 64) for i in range(sizes["weights"])]
            regions["weights"].set_live(rng.choice([None, live]))
    turn += 1
    say(turn)
    time.sleep(rng.random() * 0.004)
"""


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2])
def test_killing_jobs_and_brokers_at_random_harms_nobody_else(node_factory, tmp_path, seed):
    import select

    rng = random.Random(seed)
    # 20 pages; each job has 11. Of 33 pages 13 are always away: the host has room for some of them.
    node = node_factory("40M", PYMUX_HOST_BUDGET="96M", PYMUX_SPILL_DIR=str(tmp_path))

    def start(name, n):
        p = node.start(WORKER, NAME=name, SEED=str(n))
        assert hear(p) == "ready"
        return p

    jobs = {f"job{i}": start(f"job{i}", i) for i in range(3)}
    turns = dict.fromkeys(jobs, 0)
    last = dict.fromkeys(jobs, time.monotonic())
    began, next_harm, harms = time.monotonic(), 0.5, 0
    while time.monotonic() - began < 8:
        pipes = {p.stdout.fileno(): name for name, p in jobs.items()}
        for fd in select.select(list(pipes), [], [], 0.02)[0]:
            name = pipes[fd]
            hear(jobs[name])  # fails with the job's stderr when it ended
            turns[name] += 1
            last[name] = time.monotonic()
        slow = [n for n, t in last.items() if time.monotonic() - t > 8]
        assert not slow, f"{slow} hang: {node.status()}"
        if time.monotonic() - began > next_harm:
            next_harm += 0.2 + rng.random() * 0.8
            harms += 1
            if rng.random() < 0.25:
                os.kill(node.until(lambda s: s["pid"])["pid"], signal.SIGKILL)
            else:
                name = rng.choice(sorted(jobs))
                jobs[name].send_signal(signal.SIGKILL)
                jobs[name].wait()
                node.processes.remove(jobs[name])
                for pipe in (jobs[name].stdin, jobs[name].stdout, jobs[name].stderr):
                    pipe.close()
                jobs[name] = start(name, 100 * harms)
                last = dict.fromkeys(jobs, time.monotonic())
    assert harms >= 5
    assert sum(turns.values()) > 40
    for p in jobs.values():
        p.kill()
    # Nothing is left behind: one more job can have the whole device.
    node.run('mux = pymux.connect("last")\nr = mux.region("w")\nwith mux.phase("x"): b = r.allocate(20 * PAGE)')
