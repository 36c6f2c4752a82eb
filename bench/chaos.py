"""Thousands of handoffs between jobs that are killed and stopped at random, and whose broker is.

Every page's contents are checked against a shadow copy in each phase. A mismatch, a job without a turn for 5 s
though it is neither stopped nor starting, or memory that is left behind ends the bench with an error.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

from common import arguments, publish, result

args = arguments(
    __doc__,
    handoffs={"type": int, "default": 10_000},
    jobs={"type": int, "default": 3},
    seed={"type": int, "default": 1},
    every={"type": float, "default": 2.0, "help": "seconds between harms"},
)

from tests.chaos import Chaos  # noqa: E402 - sets PYMUX_TEST_HOME and more
from tests.conftest import Node  # noqa: E402


def main() -> None:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as home, tempfile.TemporaryDirectory() as spill:
        (Path(home) / "broker.toml").write_text("unresponsive_after = 1")
        node = Node(
            Path(home),
            "40M",
            {"PYMUX_HOST_BUDGET": "96M", "PYMUX_SPILL_DIR": spill, "PYMUX_BROKER_CONFIG": home + "/broker.toml"},
        )
        chaos = Chaos(node, args.seed, args.jobs)
        out = chaos.run(handoffs=args.handoffs, every=args.every)
        chaos.close()
        status = node.until(lambda s: not s["clients"])
        (device,) = status["devices"]
        left = device["budget_pages"] - device["free_pages"]
        descriptors = sum(1 for _ in Path(f"/proc/{status['pid']}/fd").iterdir())
        # One more job can have the whole device, and finds nothing of the others in it.
        node.run(
            'mux = pymux.connect("last")\nr = mux.region("w")\nwith mux.phase("x"):\n'
            "    b = r.allocate(20 * PAGE)\n    check(b, 0)",
        )
        node.close()
    results = [
        result("handoffs", out.handoffs, "", at_least=args.handoffs),
        result("handoffs_per_s", out.handoffs / out.seconds, "1/s"),
        result("jobs_killed", out.kills, ""),
        result("jobs_stopped", out.stops, ""),
        result("brokers_killed", out.brokers, ""),
        result("mismatches", 0, "", at_most=0),  # the first would have ended the run
        result("longest_turn_s", out.longest_wait, "s", at_most=5),
        result("pages_left_behind", left, "", at_most=0),
        result("broker_descriptors_left", descriptors, ""),
    ]
    publish("chaos", "simulated", results, args.json)


if __name__ == "__main__":
    main()
