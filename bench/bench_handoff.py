"""Handoffs between two processes that each need 60 % of the device: what moves, and what anybody waits for.

Scenarios, each with pymux and (where said) with everything swapped at every yield:

- turns: weights (half of each job) are read only, the optimizer is written; phases of a few
  milliseconds, so that nothing can be hidden behind them. Also as snapshots.
- both fit: the same with 40 % each.
- kv: little but a KV cache of which 20 % is live in scattered blocks, and jobs that need all of the device, so that all
  of it leaves and comes back at every turn.
- hidden: a training phase that writes everything, then a rollout that reads the weights, at least as
  long as the copies take; the other job waits meanwhile.

The critical path of a handoff is from the end of one job's phase body to the begin of the other's. Hidden
are bytes that moved outside of it; a copy counts by the share of its time that lies outside.
"""

import json
import statistics
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path

from common import ROOT, Driver, arguments, node, publish, result, size_t, u64

args = arguments(
    __doc__,
    mib={"type": int, "default": 640, "help": "capacity of the device"},
    turns={"type": int, "default": 10},
    worker={"default": None, "help": "for the processes of the bench itself"},
)
PAGE = 2 << 20
LINK = 4e9


class Job:
    """A process that runs phases as it is told; see worker()."""

    def __init__(self, name: str, **options: object) -> None:
        command = [sys.executable, str(Path(__file__).resolve()), "--worker", json.dumps({"name": name, **options})]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT)
        self.hear()

    def say(self, phases: list) -> None:
        self.process.stdin.write(json.dumps(phases) + "\n")
        self.process.stdin.flush()

    def hear(self) -> object:
        return json.loads(self.process.stdout.readline())

    def close(self) -> None:
        self.process.stdin.close()
        self.process.wait(30)
        self.process.stdout.close()


def worker(name: str, regions: dict[str, int], live: float, swap: str) -> None:
    """Take orders from stdin: phases one after the other; answer with when they were, and with figures."""
    import pymux

    driver = Driver()

    def fill(ptr: int, byte: int, nbytes: int) -> None:
        driver("cuMemsetD8_v2", u64(ptr), byte, size_t(nbytes))

    mux = pymux.connect(name, swap=swap)
    blocks = {}
    for region, pages in regions.items():
        with mux.region(region) as r:
            blocks[region] = r.allocate(pages * PAGE)
            fill(blocks[region].ptr, 1, pages * PAGE)
    print(json.dumps("ready"), flush=True)
    for line in sys.stdin:
        phases = json.loads(line)
        if not phases:
            print(json.dumps(mux.trace()["swaps"]), flush=True)
            continue
        answer = {}
        for i, (uses, writes, seconds) in enumerate(phases):
            with mux.phase(f"phase-{i}", uses=uses, writes=writes):
                answer.setdefault("begin", time.monotonic())
                if i == 0:
                    print(json.dumps("running"), flush=True)
                for region in writes:
                    fill(blocks[region].ptr, 2, PAGE)
                if live < 1:
                    mux.region("kv").set_live(scattered(blocks["kv"].ptr - mux.region("kv").base, regions["kv"], live))
                time.sleep(seconds)
                answer["end"] = time.monotonic()
        print(json.dumps(answer | {"regions": mux.stats()["regions"]}), flush=True)


def scattered(first: int, pages: int, live: float) -> list[tuple[int, int]]:
    """Ranges of a KV cache's used blocks: 64 KiB each, evenly spread."""
    block = 64 << 10
    return [(first + at, block) for at in range(0, pages * PAGE - block + 1, round(block / live))]


def overlap(a: tuple[float, float], b: tuple[float, float]) -> float:
    return max(0.0, min(a[1], b[1]) - max(a[0], b[0]))


def run(share: float, phases: list, regions: dict[str, float], *, live: float = 1.0, swap: str = "demand") -> dict:
    """Alternate two jobs.

    Args:
        share: of the capacity that each job needs.
        phases: (uses, writes, seconds) of a turn.
        regions: how a job's memory is divided.
        live: share of the KV cache that is live.
        swap: as pymux.connect().

    Returns:
        ``bytes`` moved in a turn; ``path``: median seconds of the critical path; ``hidden``: share of the bytes
        that moved outside of it; ``regions``: bytes moved in a turn by region; ``pages``: of the regions.
    """
    total = int(args.mib * share) // 2
    pages = {name: round(total * part) for name, part in regions.items()}
    warm = 4
    with node(PYMUX_SIM_CAPACITY=f"{args.mib}M", PYMUX_CAPACITY=f"{args.mib}M", PYMUX_SIM_LINK=str(LINK)):
        jobs = [Job(n, regions=pages, live=live, swap=swap) for n in "ab"]
        jobs[0].say(phases)
        jobs[0].hear()
        answers = []
        for turn in range(2 * args.turns + warm):
            me, other = jobs[turn % 2], jobs[1 - turn % 2]
            other.say(phases)  # it waits while this one runs
            answers.append(me.hear())
            assert other.hear() == "running"
        answers.append(other.hear())
        swaps = []
        for job in jobs:
            job.say([])
            swaps += job.hear()
            job.close()
    windows = [(a["end"], b["begin"]) for a, b in pairwise(answers)][warm:]
    moved = {}
    for name in pages:
        last, first = ([answers[i + k]["regions"][name] for k in (0, 1)] for i in (-2, warm - 1))
        moved[name] = sum(
            b[key] - a[key]
            for a, b in zip(first, last, strict=True)
            for key in ("swapped_out_bytes", "swapped_in_bytes")
        ) / (len(answers) - 1 - warm)
    spans = [s for s in swaps if s["bytes"] and s["end"] > windows[0][0]]
    weight = sum(s["bytes"] for s in spans)
    exposed = sum(
        s["bytes"] * sum(overlap((s["begin"], s["end"]), w) for w in windows) / (s["end"] - s["begin"]) for s in spans
    )
    return {
        "bytes": sum(moved.values()),
        "path": statistics.median(b - a for a, b in windows),
        "hidden": 1 - exposed / weight if weight else 1.0,
        "regions": moved,
        "pages": pages,
    }


if args.worker:
    worker(**json.loads(args.worker))
    sys.exit()

halves = {"weights": 0.5, "optimizer": 0.5}
step = [(["weights", "optimizer"], ["optimizer"], 0.005)]
train_and_rollout = [
    (["weights", "optimizer"], ["weights", "optimizer"], 0.02),
    (["weights"], [], 3 * 0.2 * args.mib * (1 << 20) / LINK),  # three times what 20 % of the device take to copy
]
turns = run(0.6, step, halves)
snapshot = run(0.6, step, halves, swap="snapshot")
both_fit = run(0.4, train_and_rollout, halves)
hidden = run(0.6, train_and_rollout, halves)
kv = run(1.0, [(["weights", "kv"], ["kv"], 0.005)], {"weights": 0.1, "kv": 0.9}, live=0.2)
live_bytes = sum(n for _, n in scattered(0, kv["pages"]["kv"], 0.2))

with node():
    device = Driver().device.name
publish(
    "handoff",
    device,
    [
        result("capacity", args.mib, "MiB"),
        result("moved_per_turn", turns["bytes"] / 2**20, "MiB"),
        result("moved_per_turn_snapshot", snapshot["bytes"] / 2**20, "MiB"),
        result("bytes_vs_snapshot", turns["bytes"] / snapshot["bytes"], "ratio", at_most=0.35),
        result("critical_path", turns["path"] * 1e3, "ms"),
        result("critical_path_snapshot", snapshot["path"] * 1e3, "ms"),
        result("critical_path_vs_snapshot", turns["path"] / snapshot["path"], "ratio", at_most=0.35),
        result("bytes_when_both_fit", both_fit["bytes"], "bytes", at_most=0),
        result("kv_bytes_vs_live", kv["regions"]["kv"] / (2 * live_bytes), "ratio", at_most=1.05),
        result("hidden_fraction", hidden["hidden"], "ratio", at_least=0.70),
        result("hidden_moved_per_turn", hidden["bytes"] / 2**20, "MiB"),
        result("hidden_critical_path", hidden["path"] * 1e3, "ms"),
    ],
    args.json,
)
