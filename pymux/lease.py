"""The life of a lease: its states, and what leads from one to the next. Pure.

Invariants: what is not in TRANSITIONS does not happen, and is an AssertionError where somebody tries; a
lease occupies its devices in the states of OCCUPIES and in no other; a generation is given once.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from pymux.events import Grant

GroupKey = tuple[str, str]


class State(Enum):
    """Where a lease is in its life."""

    WAITING = "waiting"  # in the queue
    GRANTED = "granted"  # the devices are the group's; its members make their regions resident
    ACTIVE = "active"  # all members have acknowledged: the body runs, or the lease is parked
    RECALLED = "recalled"  # the same, and somebody waits
    PRESSED = "pressed"  # the same, and it should give way at its next yield point
    DRAINING = "draining"  # the phase is over; members wait for their devices
    LENDING = "lending"  # the same, and the group will be back in a moment
    UNDOING = "undoing"  # a member could not; the others give back what they took
    LENT = "lent"  # the devices are others' until the group is back
    FENCED = "fenced"  # a member was silent for too long: the devices are others', whatever it does
    ENDED = "ended"


class Cause(Enum):
    """What moves a lease on."""

    GRANT = "grant"
    ACKNOWLEDGED = "all acknowledged"
    RECALL = "recall"
    PRESS = "press"
    RELEASE = "release"
    LEND = "release, back soon"
    FAIL = "a member fails"
    DRAINED = "all drained"
    RESUME = "acquire again"
    LAPSE = "not back in time"
    FENCE = "a member is silent"
    WITHDRAW = "cancel, denial or death"


OCCUPIES = (State.GRANTED, State.ACTIVE, State.RECALLED, State.PRESSED, State.DRAINING, State.LENDING, State.UNDOING)
RUNNING = (State.ACTIVE, State.RECALLED, State.PRESSED)  # tuples: an Enum's hash is slow

TRANSITIONS: dict[tuple[State, Cause], State] = {
    (State.WAITING, Cause.GRANT): State.GRANTED,
    (State.WAITING, Cause.WITHDRAW): State.ENDED,
    (State.GRANTED, Cause.ACKNOWLEDGED): State.ACTIVE,
    (State.GRANTED, Cause.FAIL): State.UNDOING,
    (State.GRANTED, Cause.RELEASE): State.DRAINING,
    (State.GRANTED, Cause.LEND): State.LENDING,
    (State.ACTIVE, Cause.RECALL): State.RECALLED,
    (State.ACTIVE, Cause.PRESS): State.PRESSED,
    (State.RECALLED, Cause.PRESS): State.PRESSED,
    **{(s, Cause.RELEASE): State.DRAINING for s in RUNNING},
    **{(s, Cause.LEND): State.LENDING for s in RUNNING},
    (State.LENDING, Cause.RELEASE): State.DRAINING,
    (State.DRAINING, Cause.DRAINED): State.ENDED,
    (State.LENDING, Cause.DRAINED): State.LENT,
    (State.UNDOING, Cause.DRAINED): State.WAITING,
    (State.LENT, Cause.RESUME): State.WAITING,
    (State.LENT, Cause.LAPSE): State.ENDED,
    (State.LENT, Cause.WITHDRAW): State.ENDED,
    (State.GRANTED, Cause.FENCE): State.WAITING,
    (State.UNDOING, Cause.FENCE): State.WAITING,
    **{(s, Cause.FENCE): State.FENCED for s in (*RUNNING, State.DRAINING, State.LENDING)},
    (State.FENCED, Cause.WITHDRAW): State.ENDED,
    **{(s, Cause.WITHDRAW): State.ENDED for s in OCCUPIES},
}


@dataclass(slots=True, eq=False)
class Lease:
    """A group's right to run on its devices, from the request to the end.

    Attributes:
        order: of arrival, among all leases.
        openers: the clients that asked, with their sequence numbers; the phase lasts until each has released.
        members: the clients on the devices of the lease, and all openers.
        arrived: when the group asked, for the order of the queue.
        expected: seconds that the phase takes in all, as its caller said; 0: as learnt.
        ran: seconds of it that were done before this grant.
        promised: the lease that is granted when this one is released, and `promise`, its grant.
        recalled_for: order of the lease that it was last recalled for.
        until: of a loan, when the group wants its devices back; of a request, before when it is not tried again.
        failure: why a member could not, and `error`, the exception's name.
        prepared: members that were told of the request without having asked.
        askers: by opener, the number of its thread or task.
        kept: the same of those that have the phase open, as far as they were asked: a lease may be parked.
        noticed: whether who waits was told that members are missing.
    """

    order: int
    group: GroupKey
    phase: str
    arrived: float
    state: State = State.WAITING
    generation: int = 0
    devices: frozenset[str] = frozenset()
    openers: dict[int, int] = field(default_factory=dict)
    members: frozenset[int] = frozenset()
    ranks: frozenset[int] = frozenset()
    regions: str = ""
    priority: int = 0
    overlap: bool = False
    expected: float = 0.0
    ran: float = 0.0
    granted: float = 0.0
    began: float = 0.0
    lacking: dict[str, int] = field(default_factory=dict)
    ready: set[int] = field(default_factory=set)
    known: int = 0
    released: set[int] = field(default_factory=set)
    failure: str = ""
    error: str = ""
    attempts: int = 0
    promised: Lease | None = None
    promise: Grant | None = None
    recalled_for: int = 0
    until: float = 0.0
    prepared: set[int] = field(default_factory=set)
    askers: dict[int, int] = field(default_factory=dict)
    kept: dict[int, int] = field(default_factory=dict)
    noticed: bool = False

    def move(self, cause: Cause) -> State:
        """Change state; what the table does not know is a mistake of the scheduler's."""
        at = (self.state, cause)
        assert at in TRANSITIONS, f"a lease that is {self.state.value} cannot {cause.value}"
        self.state = TRANSITIONS[at]
        return self.state

    @property
    def occupies(self) -> bool:
        """Whether the devices are the group's now."""
        return self.state in OCCUPIES

    @property
    def current(self) -> bool:
        """Whether it is granted and its phase not over."""
        return self.state is State.GRANTED or self.running

    @property
    def running(self) -> bool:
        """Whether the body may run."""
        return self.state in RUNNING


def diagram() -> str:
    """The transition table as a Mermaid state diagram."""
    lines = ["stateDiagram-v2", f"    [*] --> {State.WAITING.value}: acquire"]
    causes: dict[tuple[State, State], list[str]] = {}
    for (state, cause), after in TRANSITIONS.items():
        causes.setdefault((state, after), []).append(cause.value)
    lines += [f"    {a.value} --> {b.value}: {' / '.join(c)}" for (a, b), c in causes.items()]
    return "\n".join([*lines, f"    {State.ENDED.value} --> [*]"]) + "\n"
