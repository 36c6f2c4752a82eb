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
    """A process connected. A reconnecting one brings the pages and the lease that it holds."""

    job: str
    name: str
    group: str
    device: str
    page_size: int
    rank: int = 0
    world: int = 1
    held: int = 0
    lease_generation: int = 0
    host_pinned: int = 0
    counts: Counts = field(default_factory=Counts)


@dataclass(frozen=True, kw_only=True, slots=True)
class Left(Event):
    """A process is gone, with everything it held."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Acquire(Event):
    """A group wants its devices. ``want``: pages its client must hold; ``own``: held and unneeded."""

    seq: int
    phase: str
    want: int
    own: int = 0
    expected: float = 0.0
    counts: Counts = field(default_factory=Counts)


@dataclass(frozen=True, kw_only=True, slots=True)
class Cancel(Event):
    """The client no longer waits for this request."""

    seq: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Release(Event):
    """The lease of this generation is given back."""

    generation: int
    counts: Counts = field(default_factory=Counts)


@dataclass(frozen=True, kw_only=True, slots=True)
class Ready(Event):
    """The body of the phase runs.

    ``counts``: what the client could give away meanwhile; ``want``: pages that it must hold for the
    regions that are still to come. Sent again when these change.
    """

    generation: int
    want: int = 0
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
    """The lease is the client's group's."""

    seq: int
    generation: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Recall(Action):
    """Somebody waits: return the lease at the end of the phase, or now if it is parked."""

    generation: int


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
    """The client may have so many bytes of host memory pinned. ``exhausted``: there is no more now."""

    granted: int
    exhausted: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Deny(Action):
    """The request cannot be met. ``capacity``: it never can."""

    seq: int
    need: int
    budget: int
    capacity: bool
    text: str
