"""Waits that would never end: threads and tasks, each of which has what another waits for. Pure.

What it is not: a wait for somebody who works on is none of these, however long it takes; only what was told counts, so
that a holder who is silent is never taken for one who waits.

Invariants: a cycle is reported when it is found twice, at different times and unchanged, since what is told of
several connections arrives in any order.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from typing import Any

Opener = tuple[int, int]  # a process, and the number of one of its threads or tasks
CONFIRM_SECONDS = 0.1  # between the two times


@dataclass(frozen=True, kw_only=True, slots=True)
class Wait:
    """An opener that waits.

    Attributes:
        who: waits.
        behind: those that have what it waits for, all of which it needs to end, and how a person knows what they have.
        order: of arrival.
        what: the request, for who is to fail it.
    """

    who: Opener
    behind: Mapping[Opener, str]
    order: int
    what: Any


class Deadlocks:
    """Finds them."""

    def __init__(self) -> None:
        self._suspected: frozenset[tuple[Opener, int]] = frozenset()
        self._since = 0.0

    def look(self, waits: Sequence[Wait], now: float) -> list[Wait]:
        """Return a cycle that lasts, the youngest wait first; or nothing."""
        cycle = _cycle(waits)
        found = frozenset((w.who, w.order) for w in cycle)
        if found != self._suspected:
            self._suspected, self._since = found, now
            return []
        if not cycle or now - self._since < CONFIRM_SECONDS:
            return []
        self._suspected = frozenset()
        youngest = max(range(len(cycle)), key=lambda i: cycle[i].order)
        return cycle[youngest:] + cycle[:youngest]


def _cycle(waits: Sequence[Wait]) -> list[Wait]:
    """Some openers each of which waits for the next, and the last for the first."""
    at = {w.who: w for w in waits}
    try:
        TopologicalSorter({who: w.behind for who, w in at.items()}).prepare()
    except CycleError as e:
        found: list[Opener] = e.args[1]  # each is waited for by the next; the first is the last, too
        return [at[who] for who in reversed(found[1:])]
    return []


def explain(cycle: Sequence[Wait], phase: str) -> str:
    """Say to the first of a cycle what it waits for."""
    has = [w.behind[after.who] for w, after in zip(cycle, [*cycle[1:], cycle[0]], strict=True)]
    if len(has) > 4:
        has[2:-1] = ["..."]
    return (
        f"phase {_short(phase)!r} would wait for ever: for {', whose thread waits for '.join(has)}, which this thread "
        f"has open. Open phases in the same order everywhere, or use one connection: connect(devices=[0, 1])."
    )


def label(job: str, name: str, process: int) -> str:
    """Name a client."""
    return f"{_short(job)}/{_short(name)} (pid {process})"


def _short(text: str) -> str:
    return text if len(text) <= 20 else f"{text[:17]}..."
