"""Explores the scheduler's states with larger bounds: python tests/model_check.py [STATES]. Prints how far it came."""

import sys
import time

from tests.model import Setup, explore
from tests.test_model import GROUP, SETUPS

LARGE = [
    Setup("three singles", (("a", "A", 1), ("b", "A", 2), ("c", "B", 1)), phases=2, ticks=2),
    Setup("a group and a single", (("a", "A", 2), ("g", "A", 1), ("g", "B", 1)), joint=GROUP, failures=1, loans=1),
    Setup("a controller", (("a", "A", 2), ("g", "A", 1), ("g", "", 0)), joint=GROUP, phases=2, failures=1),
    Setup("stopped", (("a", "A", 2), ("g", "A", 1), ("g", "B", 1)), joint=GROUP, stops=1, ticks=4),
]

limit = int(sys.argv[1]) if len(sys.argv) > 1 else 10**9
for setup in [*SETUPS, *LARGE]:
    begin = time.monotonic()
    states = explore(setup, limit)
    print(f"{setup.name}: {states} states in {time.monotonic() - begin:.0f} s, no promise broken", flush=True)
