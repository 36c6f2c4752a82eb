"""What happens to the scheduler (events) and what it wants done (actions). Plain data.

Pages are counts of the device's page size. Times are seconds on any steady clock.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True, slots=True)
class Counts:
    """What a client could give away, in pages, by what giving it would cost."""

    resident: int = 0
    discardable: int = 0
    clean: int = 0
    dirty: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Event:
    """Something that happened to a client."""

    client: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Joined(Event):
    """A process connected. A reconnecting one brings the pages and the lease that it holds.

    ``world``: members of its group that have a device; ``joint``: there may be others in it. ``device``: empty for
    a controller, which has no device memory. ``opener``: it opened the phase of its
    lease. ``need``, ``host_need``: bytes of device and host memory that it will need at most; 0: unknown.
    ``process``: its pid; 0: unknown.
    """

    job: str
    name: str
    group: str
    device: str
    page_size: int
    rank: int = 0
    world: int = 1
    joint: bool = False
    held: int = 0
    lease_generation: int = 0
    opener: bool = True
    phase: str = ""
    host_pinned: int = 0
    need: int = 0
    host_need: int = 0
    process: int = 0
    counts: Counts = field(default_factory=Counts)


@dataclass(frozen=True, kw_only=True, slots=True)
class Left(Event):
    """A process is gone, with everything it held."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Acquire(Event):
    """A group wants its devices.

    ``want``: pages its client must hold; ``own``: held and unneeded. ``expected``: seconds of the whole phase,
    0: as learnt; ``ran``: seconds of it that are done. ``ranks``: of the
    members whose devices are wanted; empty: all. ``regions``: what the members must have there. ``opener``: the
    thread or task that asks; 0: none that could wait for others.
    """

    seq: int
    phase: str
    want: int
    own: int = 0
    expected: float = 0.0
    ran: float = 0.0
    priority: int = 0
    overlap: bool = False
    ranks: frozenset[int] = frozenset()
    regions: str = ""
    opener: int = 0
    counts: Counts = field(default_factory=Counts)


@dataclass(frozen=True, kw_only=True, slots=True)
class Kept(Event):
    """After a recall: this thread or task of the client has the lease's phase open; 0: none any more."""

    generation: int
    opener: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Queued(Event):
    """A thread or task of the client's process waits for another's phase of it to end; ``behind`` 0: not any more."""

    seq: int
    opener: int
    behind: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Cancel(Event):
    """The client no longer waits for this request."""

    seq: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Release(Event):
    """The client's part of this generation's lease is over, and its device drained.

    ``back``: seconds until it wants the device again, in the middle of its phase; 0: no loan.
    """

    generation: int
    back: float = 0.0
    counts: Counts = field(default_factory=Counts)


@dataclass(frozen=True, kw_only=True, slots=True)
class Failed(Event):
    """A member cannot make its regions resident. ``for_good``: trying again is no use."""

    generation: int
    text: str
    for_good: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Ran(Event):
    """Phases of this name have ended: how many, and how many seconds they took in all."""

    phase: str
    count: int
    seconds: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Pong(Event):
    """The client answers a Ping: its agent runs."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Ready(Event):
    """The body of the phase runs.

    ``counts``: what the client could give away meanwhile; ``want``: pages that it must hold for the
    regions that are still to come; ``known``: a bit for each region of the request that it has. Sent again when
    these change.
    """

    generation: int
    want: int = 0
    known: int = 0
    counts: Counts = field(default_factory=Counts)


@dataclass(frozen=True, kw_only=True, slots=True)
class Want(Event):
    """A client that holds its lease needs more pages."""

    seq: int
    want: int
    own: int = 0
    counts: Counts = field(default_factory=Counts)


@dataclass(frozen=True, kw_only=True, slots=True)
class Returned(Event):
    """A client gave pages back; ``missing`` more were asked for and cannot be given now."""

    count: int
    missing: int = 0
    want: int = 0
    counts: Counts = field(default_factory=Counts)


@dataclass(frozen=True, kw_only=True, slots=True)
class HostWant(Event):
    """A client wants so many bytes of host memory pinned in all; ``urgent``: a swap-out waits."""

    want: int
    urgent: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Budget:
    """How many pages the device has for clients."""

    device: str
    pages: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Tick:
    """Time has passed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Action:
    """Something to tell a client."""

    client: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Grant(Action):
    """The lease is the client's group's; ``seq`` is 0 for a member that did not ask."""

    seq: int
    generation: int
    phase: str = ""
    regions: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Promise(Action):
    """For the broker: when the client releases this generation for good, this will be among the actions.

    It may be sent at once, before anything is decided. None: what was promised for this generation is not so.
    """

    generation: int
    grant: Grant | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Prepare(Action):
    """Another member asked for this phase: fetch its regions as pages come."""

    phase: str
    regions: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Active(Action):
    """All members of the group have acknowledged: the body may run."""

    generation: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Drain(Action):
    """The phase is over, or the grant is undone: wait for the device, then release. 0: it was only prepared."""

    generation: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Ended(Action):
    """All members have drained their devices."""

    generation: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Recall(Action):
    """Somebody waits: return the lease at the end of the phase, or now if it is parked.

    ``press``: at the next yield point. ``extend``: for so many seconds phases that follow at once may go first.
    """

    generation: int
    press: bool = False
    extend: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Ping(Action):
    """Answer, so that it is known that you run."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Fenced(Action):
    """A member did not answer for too long; the lease of this generation goes to others.

    ``requeued``: it had not begun, and waits again as the same request.
    """

    generation: int
    requeued: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Unresponsive(Action):
    """For the broker: the client has not answered for so many seconds."""

    seconds: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Take(Action):
    """Give this many pages back."""

    count: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Give(Action):
    """This many pages are the client's from now on."""

    count: int


@dataclass(frozen=True, kw_only=True, slots=True)
class HostGrant(Action):
    """The client may have so many bytes of host memory pinned. ``exhausted``: what was urgent is not there."""

    granted: int
    exhausted: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class TrimHost(Action):
    """Others need host memory: give back what is pinned and not in use, and say what is left."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Notice(Action):
    """Something that the client's user should know."""

    text: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Deny(Action):
    """The request cannot be met, because of an error of pymux.errors by this name."""

    seq: int
    need: int
    budget: int
    error: str
    text: str
