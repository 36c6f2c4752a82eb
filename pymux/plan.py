"""Jobs' phases played through the scheduler in virtual time: what a policy would do, in milliseconds. Pure.

What it is not: a model of a GPU. Pages take a fixed time each, out and in; phases take what they are told.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from pymux.events import (
    Acquire,
    Action,
    Counts,
    Event,
    Give,
    Grant,
    Joined,
    Ran,
    Ready,
    Recall,
    Release,
    Returned,
    Take,
    Tick,
)
from pymux.jobs import Limits
from pymux.policy import Policy
from pymux.scheduler import Scheduler

_DEVICE = "GPU-planned"
_PAGE = 1 << 20


@dataclass(frozen=True, kw_only=True, slots=True)
class Phase:
    """A stretch of a job's loop.

    Attributes:
        name: such as ``"rollout"``.
        seconds: that it takes alone.
        device: whether it needs the device.
    """

    name: str
    seconds: float
    device: bool = True


@dataclass(frozen=True, kw_only=True, slots=True)
class Work:
    """A job that goes through its steps over and over.

    Attributes:
        job: its name.
        steps: the phases of each step.
        pages: that its phases need on the device.
        yield_every: seconds between yield points inside its phases; 0: there are none.
        limits: what the broker is told of it.
    """

    job: str
    steps: Sequence[Sequence[Phase]]
    pages: int = 1
    yield_every: float = 0.0
    limits: Limits = field(default_factory=Limits)


@dataclass(slots=True)
class Outcome:
    """How a job fared.

    Attributes:
        device_seconds: that it computed on the device.
        solo_seconds: that its finished phases take alone, on the device and off it.
        elapsed_seconds: that they took.
    """

    device_seconds: float = 0.0
    solo_seconds: float = 0.0
    elapsed_seconds: float = 0.0

    @property
    def slowdown(self) -> float:
        """Elapsed over solo time."""
        return self.elapsed_seconds / self.solo_seconds if self.solo_seconds else 1.0


@dataclass(slots=True)
class _Client:
    work: Work
    phases: _Forever
    outcome: Outcome = field(default_factory=Outcome)
    phase: Phase | None = None
    left: float = 0.0  # seconds of the phase that are still to run
    began: float = 0.0  # the phase
    ran: float = 0.0
    seq: int = 0
    generation: int = 0
    held: int = 0
    arrives: float = 0.0  # when the last page that was given is there
    gone: float = 0.0  # when the last page that was taken is out
    waiting: bool = False
    pressed: bool = False
    extend_until: float = 0.0


def simulate(
    jobs: Sequence[Work],
    policy: Policy,
    *,
    pages: int,
    page_seconds: float,
    until: float,
    tick: float = 1.0,
) -> dict[str, Outcome]:
    """Play jobs on one device.

    Args:
        jobs: who shares the device.
        policy: whose turn it is.
        pages: that the device has for regions.
        page_seconds: seconds to copy a page out, or in.
        until: seconds of virtual time to play.
        tick: seconds between looks at a contended device; the shortest phases should take longer.

    Returns:
        For each job, what it had when the time was up.
    """
    return _Play(jobs, policy, pages, page_seconds, tick).run(until)


class _Play:
    def __init__(self, jobs: Sequence[Work], policy: Policy, pages: int, page_seconds: float, tick: float) -> None:
        self.now = 0.0
        self.tick = tick
        self.page_seconds = page_seconds
        self.agenda: list[tuple[float, int, Callable[[], None]]] = []
        self.count = 0
        self.tick_at: float | None = None
        self.scheduler = Scheduler(
            policy, host_budget=1 << 60, limits={w.job: w.limits for w in jobs}, unresponsive_after=1e12
        )
        self.scheduler.add_device(_DEVICE, _PAGE, pages, pages)
        self.clients = {i: _Client(w, _Forever(w)) for i, w in enumerate(jobs, 1)}
        for i, w in enumerate(jobs, 1):
            joined = Joined(client=i, job=w.job, name="main", group="main", device=_DEVICE, page_size=_PAGE)
            self._send(joined)
            self._next_phase(i)

    def run(self, until: float) -> dict[str, Outcome]:
        while self.agenda and self.agenda[0][0] <= until:
            self.now, _, do = heapq.heappop(self.agenda)
            do()
        return {c.work.job: c.outcome for c in self.clients.values()}

    def _at(self, when: float, do: Callable[[], None]) -> None:
        self.count += 1
        heapq.heappush(self.agenda, (when, self.count, do))

    def _send(self, event: Event | Tick) -> None:
        for action in self.scheduler.handle(event, self.now):
            self._receive(action)
        due = self.scheduler.next_deadline(self.now)
        if due is not None and self.tick_at is None:
            self.tick_at = max(due, self.now + self.tick)
            self._at(self.tick_at, self._tick)

    def _tick(self) -> None:
        self.tick_at = None
        self._send(Tick())

    def _receive(self, action: Action) -> None:
        c = self.clients[action.client]
        match action:
            case Grant(generation=generation):
                c.generation = generation
                self._try_start(action.client)
            case Give(count=n):
                c.held += n
                c.arrives = max(self.now, c.arrives) + n * self.page_seconds
                self._try_start(action.client)
            case Take(count=n):
                for _ in range(n):
                    c.gone = max(self.now, c.gone) + self.page_seconds
                    self._at(c.gone, lambda: self._give_back(action.client))
            case Recall(press=press, extend=extend):
                c.pressed = c.pressed or press
                c.extend_until = self.now + extend
            case _:
                pass

    def _give_back(self, i: int) -> None:
        c = self.clients[i]
        c.held -= 1
        want = c.work.pages if c.waiting else 0
        self._send(Returned(client=i, count=1, want=want, counts=_dirty(c)))

    def _next_phase(self, i: int) -> None:
        c = self.clients[i]
        phase = c.phase = next(c.phases)
        c.left, c.began, c.ran = phase.seconds, self.now, 0.0
        if c.generation:  # it follows at once
            self._run(i)
        elif phase.device:
            self._ask(i)
        else:
            self._at(self.now + phase.seconds, lambda: self._ended(i))

    def _ask(self, i: int) -> None:
        c = self.clients[i]
        assert c.phase is not None
        c.seq += 1
        c.waiting, c.generation, c.pressed = True, 0, False
        self._send(
            Acquire(
                client=i, seq=c.seq, phase=c.phase.name, want=max(c.work.pages, c.held), ran=c.ran, counts=_dirty(c)
            )
        )

    def _try_start(self, i: int) -> None:
        c = self.clients[i]
        if c.waiting and c.generation and c.held >= c.work.pages:
            c.waiting = False
            generation = c.generation
            self._at(max(self.now, c.arrives), lambda: self._start(i, generation))

    def _start(self, i: int, generation: int) -> None:
        self._send(Ready(client=i, generation=generation))
        self._run(i)

    def _run(self, i: int) -> None:
        c = self.clients[i]
        length = min(c.left, c.work.yield_every or c.left)
        self._at(self.now + length, lambda: self._paused(i, length))

    def _paused(self, i: int, length: float) -> None:
        c = self.clients[i]
        c.left -= length
        c.ran += length
        c.outcome.device_seconds += length
        if c.left > 1e-9 and not c.pressed:
            self._run(i)
            return
        assert c.phase is not None
        if c.left > 1e-9:
            self._release(i)
            self._ask(i)
            return
        self._send(Ran(client=i, phase=c.phase.name, count=1, seconds=c.ran))
        if not (c.phases.peek().device and self.now < c.extend_until):
            self._release(i)
        self._ended(i)

    def _release(self, i: int) -> None:
        c = self.clients[i]
        self._send(Release(client=i, generation=c.generation, counts=_dirty(c)))
        c.generation, c.extend_until = 0, 0.0

    def _ended(self, i: int) -> None:
        c = self.clients[i]
        assert c.phase is not None
        c.outcome.solo_seconds += c.phase.seconds
        c.outcome.elapsed_seconds += self.now - c.began
        self._next_phase(i)


class _Forever:
    """A job's phases, over and over."""

    def __init__(self, work: Work) -> None:
        self._phases = [phase for step in work.steps for phase in step]
        self._at = 0

    def peek(self) -> Phase:
        return self._phases[self._at % len(self._phases)]

    def __next__(self) -> Phase:
        phase = self.peek()
        self._at += 1
        return phase


def _dirty(c: _Client) -> Counts:
    return Counts(resident=c.held, dirty=c.held)
