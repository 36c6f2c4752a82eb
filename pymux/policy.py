"""Who is next: the order of those that wait, and when to give way. Pure; time is an argument.

Each policy is one key: smaller runs first. What they share is here once: nobody is overtaken any more
after the wait bound, and a switch has to pay for itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import sqrt

from pymux.errors import ConfigError

WORTH = 10.0  # times the cost of switching there and back that a phase runs before it gives way
MARGIN = 0.10  # by which a waiting phase must come before the running one


@dataclass(frozen=True, kw_only=True, slots=True)
class Candidate:
    """A phase that runs or waits, as policies see it.

    Attributes:
        arrived: when its group asked for the device, seconds.
        ran: seconds since its grant, while it runs.
        remaining: seconds that it needs the device still, as expected.
        cost: seconds that switching to it takes, as expected; of what runs, back to it.
        priority: smaller is more urgent, as CUDA counts.
        weight: of its job.
        elapsed: seconds that its job has been here, those long ago counting less.
        solo: of these, seconds that it did not wait for a device.
    """

    arrived: float
    ran: float = 0.0
    remaining: float = 0.0
    cost: float = 0.0
    priority: int = 0
    weight: float = 1.0
    elapsed: float = 0.0
    solo: float = 0.0


Key = Callable[[Candidate, float], float]


@dataclass(frozen=True, kw_only=True, slots=True)
class Policy:
    """An order.

    Attributes:
        name: as users name it.
        key: of a candidate at a time; smaller runs first, ties in the order of arrival.
        max_wait: seconds after which a waiting phase comes before all that wait for less long.
        gives_way: whether a running phase with this key gives way to a waiting one with that key.
        by_arrival: whether the order is simply that of arrival.
        extension: seconds for which the running job's phases may follow each other before the waiting one's turn.
    """

    name: str
    key: Key
    max_wait: float
    gives_way: Callable[[float, float], bool]
    by_arrival: bool = False
    extension: Callable[[Candidate, Candidate, float], float] = lambda running, waiting, now: 0.0  # noqa: ARG005

    def order(self, waiting: Sequence[Candidate], now: float) -> list[int]:
        """Return the indices of the candidates, most urgent first.

        Args:
            waiting: in the order of their arrival.
            now: seconds.
        """

        def rank(i: int) -> tuple[bool, float, float]:
            c = waiting[i]
            late = self.overdue(c, now)
            return not late, 0.0 if late else self.key(c, now), c.arrived

        return sorted(range(len(waiting)), key=rank)

    def overdue(self, c: Candidate, now: float) -> bool:
        """Whether a candidate has waited for so long that nobody may overtake it."""
        return now - c.arrived >= self.max_wait

    def extends(self, running: Candidate, waiting: Candidate, now: float) -> float:
        """Seconds for which the running job may go on with phases that follow at once, though another waits.

        Without it nobody could have more than half of a device: at the end of a phase its job is not in the queue.

        Args:
            running: of the running job.
            waiting: the next one.
            now: seconds.
        """
        bound = waiting.arrived + self.max_wait - now
        return max(0.0, min(self.extension(running, waiting, now), bound))

    def yields(self, running: Candidate, waiting: Candidate, now: float) -> bool:
        """Whether a running phase should give way at its next yield point.

        Args:
            running: with ``cost`` that of switching back to it.
            waiting: the next one.
            now: seconds.
        """
        if running.ran < WORTH * (running.cost + waiting.cost):
            return False
        return self.overdue(waiting, now) or self.gives_way(self.key(running, now), self.key(waiting, now))


def _arrival(c: Candidate, now: float) -> float:  # noqa: ARG001 - a key's arguments
    return c.arrived


def _slowdown(c: Candidate, now: float) -> float:  # noqa: ARG001
    """Minus the weighted slowdown at the end of the phase, its switch being charged to it.

    Slowdown is elapsed over solo time. For jobs that always want the device solo time is device time, and equal
    weighted slowdowns are device time in proportion to the weights.
    """
    phase = max(c.remaining, 1e-3)
    return -c.weight * (c.elapsed + phase) / (c.solo + phase + c.cost)


def _until_even(running: Candidate, waiting: Candidate, now: float) -> float:  # noqa: ARG001
    """Seconds until the running job's weighted slowdown is no longer the larger one, if it goes on running.

    While it runs for t, its elapsed and solo time grow by t, and of the waiting job the elapsed time alone. Equal
    weighted slowdowns are a quadratic equation in t.
    """
    r, w = running, waiting
    next_phase, phase = max(r.remaining, 1e-3), max(w.remaining, 1e-3)
    er, sr = r.elapsed + next_phase, r.solo + next_phase
    ew, sw = w.elapsed + phase, w.solo + phase + w.cost
    a, b, c = w.weight, w.weight * (ew + sr) - r.weight * sw, w.weight * ew * sr - r.weight * er * sw
    if c >= 0:
        return 0.0
    return (-b + sqrt(b * b - 4 * a * c)) / (2 * a)


def _remaining(c: Candidate, now: float) -> float:  # noqa: ARG001
    return c.remaining + c.cost


def fifo(max_wait: float) -> Policy:
    """First come, first served; at yield points, in turns."""
    return Policy(
        name="fifo",
        key=_arrival,
        max_wait=max_wait,
        gives_way=lambda running, waiting: True,  # noqa: ARG005
        by_arrival=True,
    )


def fair(max_wait: float) -> Policy:
    """The job with the largest weighted slowdown first."""
    return Policy(
        name="fair",
        key=_slowdown,
        max_wait=max_wait,
        gives_way=lambda running, waiting: waiting < running * (1 + MARGIN),
        extension=_until_even,
    )


def priority(max_wait: float, ageing: float = 10.0) -> Policy:
    """The most urgent first; a phase gains one step for every `ageing` seconds that it waits."""

    def key(c: Candidate, now: float) -> float:
        waited = 0.0 if c.ran > 0 else now - c.arrived
        return c.priority - (waited - c.cost) / ageing

    return Policy(
        name="priority",
        key=key,
        max_wait=max_wait,
        gives_way=lambda running, waiting: waiting < running - MARGIN,
        extension=lambda running, waiting, now: (key(waiting, now) - key(running, now)) * ageing,
    )


def srpt(max_wait: float) -> Policy:
    """The phase that is expected to end first (shortest remaining processing time)."""
    return Policy(
        name="srpt",
        key=_remaining,
        max_wait=max_wait,
        gives_way=lambda running, waiting: waiting < running * (1 - MARGIN),
    )


POLICIES: dict[str, Callable[[float], Policy]] = {"fifo": fifo, "fair": fair, "priority": priority, "srpt": srpt}


def make(name: str, max_wait: float) -> Policy:
    """Return the policy of this name.

    Raises:
        ConfigError: there is none.
    """
    if name not in POLICIES:
        raise ConfigError(f"policy {name!r}: use one of {', '.join(POLICIES)}.")
    return POLICIES[name](max_wait)
