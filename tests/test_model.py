"""Every state of the scheduler that few clients can bring about, with the promises of the design in each.

`make model-check` goes further. Where there are too many states to visit all, hypothesis looks for a bad one.
"""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from pymux.policy import Policy, make
from tests.model import Setup, Violation, World, explore

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
    monkeypatch.setattr("pymux.table.Table.occupy", lambda self, lease: None)
    with pytest.raises(Violation, match="after\n  open"):
        explore(Setup("two", PAIR, **NOTHING))


def test_a_scheduler_that_forgets_somebody_is_caught(monkeypatch):
    monkeypatch.setattr(Policy, "order", lambda self, waiting, now: [0])
    monkeypatch.setattr("pymux.scheduler.Scheduler._recall", lambda *_: None)
    with pytest.raises(Violation, match="stuck"):
        explore(Setup("two", PAIR, **NOTHING))


# What hypothesis found once, as the shortest way there.
FOUND = {
    "a member is lost, and the opener stopped, while the grant is undone": [
        ("open", 2), ("tick", -1), ("crash", 1), ("tick", -1),
    ],
    "who takes a request back and asks again is granted both under one generation": [
        ("open", 1), ("open", 2), ("give up", 1), ("open", 1),
    ],
    "a grant given back was fenced and made again meanwhile": [
        ("stop", 1), ("open", 2), ("+receive", 2), ("continue", 1), ("tick", -1), ("tick", -1), ("+receive", 1),
        ("+receive", 1), ("+receive", 1), ("give up", 2), ("+receive", 1), ("open", 2),
    ],
}  # fmt: skip


@pytest.mark.parametrize("steps", FOUND.values(), ids=FOUND)
def test_what_was_found_once(steps):
    clients = (("a", "A", 1), ("g", "A", 2), ("g", "B", 3))
    world = World(Setup("found", clients, GROUP, 4, 3, stops=1, failures=2, giveups=2, ticks=4))
    for step in steps:
        world.take(step)
        world.check()
    world.serve()


class Crowd(RuleBasedStateMachine):
    """A broker and more agents than can be explored, under any policy, with everything that may happen to them."""

    @initialize(
        policy=st.sampled_from(["fifo", "fair", "priority", "srpt"]),
        singles=st.lists(st.tuples(st.sampled_from("abc"), st.sampled_from("AB"), st.integers(1, 4)), max_size=4),
        group=st.sampled_from([(), (("g", "A", 2), ("g", "B", 3)), (("g", "A", 3), ("g", "", 0))]),
    )
    def start(self, policy, singles, group):
        clients = (*singles, *group) or (("a", "A", 1),)
        setup = Setup("crowd", clients, GROUP, 4, 3, crashes=1, stops=1, failures=2, giveups=2, ticks=4, loans=1)
        self.world = World(setup, make(policy, max_wait=30.0))

    @rule(choices=st.lists(st.integers(0, 1 << 16), min_size=1, max_size=12))
    def step(self, choices):
        for choice in choices:
            if steps := self.world.steps():
                self.world.take(steps[choice % len(steps)])
                self.world.check()

    def teardown(self):
        if hasattr(self, "world"):
            self.world.serve()


TestCrowd = Crowd.TestCase
TestCrowd.settings = settings(max_examples=40, stateful_step_count=20, deadline=None)
