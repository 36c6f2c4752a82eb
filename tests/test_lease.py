"""The life of a lease is a table: what is in it happens, and nothing else; the page about it is made from it."""

import itertools

import pytest

from pymux.lease import OCCUPIES, RUNNING, TRANSITIONS, Cause, Lease, State, diagram
from tests.conftest import ROOT


@pytest.mark.parametrize(("state", "cause"), list(itertools.product(State, Cause)))
def test_what_the_table_does_not_know_does_not_happen(state, cause):
    lease = Lease(order=1, group=("j", "g"), phase="p", arrived=0, state=state)
    if (state, cause) in TRANSITIONS:
        assert lease.move(cause) is TRANSITIONS[state, cause]
    else:
        with pytest.raises(AssertionError, match=state.value):
            lease.move(cause)
        assert lease.state is state


def test_every_state_can_be_reached_and_every_life_ends():
    after = {s: {b for (a, _), b in TRANSITIONS.items() if a is s} for s in State}

    def reach(s):
        seen, todo = set(), [s]
        while todo:
            for b in after[todo.pop()] - seen:
                seen.add(b)
                todo.append(b)
        return seen

    assert reach(State.WAITING) | {State.WAITING} == set(State)
    assert all(State.ENDED in reach(s) for s in set(State) - {State.ENDED})
    assert after[State.ENDED] == set()
    assert set(RUNNING) < set(OCCUPIES)


def test_the_page_shows_the_table():
    assert diagram() in (ROOT / "docs" / "lease.md").read_text(), "make docs"
