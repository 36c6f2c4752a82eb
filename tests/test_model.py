"""Every state of the scheduler that few clients can bring about, with the promises of the design in each.

`make model-check` goes further.
"""

import pytest

from pymux.policy import Policy
from tests.model import Setup, Violation, explore

GROUP = frozenset({"g"})
NOTHING = {"crashes": 0, "repeats": 0, "giveups": 0, "ticks": 0}
SINGLES = (("a", "A", 1), ("b", "A", 2), ("c", "B", 1))
PAIR = (("a", "A", 1), ("b", "A", 2))
AND_GROUP = (("a", "A", 2), ("g", "A", 1), ("g", "B", 1))
CONTROLLED = (("a", "A", 2), ("g", "A", 1), ("g", "", 0))

SETUPS = [
    Setup("three, one dies", SINGLES, **{**NOTHING, "crashes": 1}),
    Setup("three, one gives up", SINGLES, **{**NOTHING, "giveups": 1}),
    Setup("two, anything", PAIR),
    Setup("two lend", PAIR, **{**NOTHING, "loans": 1, "ticks": 2}),
    Setup("two, one is stopped", PAIR, **{**NOTHING, "stops": 1, "ticks": 3}),
    Setup("a group, one dies", AND_GROUP, GROUP, **{**NOTHING, "crashes": 1}),
    Setup("a group, one fails", AND_GROUP, GROUP, **{**NOTHING, "failures": 1}),
    Setup("a group, one repeats itself", AND_GROUP, GROUP, **{**NOTHING, "repeats": 1}),
    Setup("a controller, one dies", CONTROLLED, GROUP, **{**NOTHING, "crashes": 1}),
]


@pytest.mark.slow
@pytest.mark.parametrize("setup", SETUPS, ids=lambda s: s.name)
def test_no_order_of_events_breaks_a_promise(setup):
    assert explore(setup) > 1000


def test_a_broken_scheduler_is_caught(monkeypatch):
    monkeypatch.setattr("pymux.table.Table.occupy", lambda self, lease: None)  # noqa: ARG005
    with pytest.raises(Violation, match="after\n  open"):
        explore(Setup("two", PAIR, **NOTHING))


def test_a_scheduler_that_forgets_somebody_is_caught(monkeypatch):
    monkeypatch.setattr(Policy, "order", lambda self, waiting, now: [0])  # noqa: ARG005
    monkeypatch.setattr("pymux.scheduler.Scheduler._recall", lambda *_: None)
    with pytest.raises(Violation, match="stuck"):
        explore(Setup("two", PAIR, **NOTHING))
