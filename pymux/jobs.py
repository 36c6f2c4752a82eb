"""Jobs: what each may have, and how long it has waited. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import exp

MEMORY_SECONDS = 600.0  # how far back fairness looks


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """What a job may have, all its processes together.

    Attributes:
        weight: share of device time under ``fair``.
        priority: smaller is more urgent, as CUDA counts.
        device_bytes: of each device; 0: all that regions may have.
        host_bytes: of pinned host memory; 0: all of the node's budget.
    """

    weight: float = 1.0
    priority: int = 0
    device_bytes: int = 0
    host_bytes: int = 0


@dataclass(slots=True)
class Job:
    """A run, while one of its processes is here.

    ``elapsed`` and ``blocked`` count the latest `MEMORY_SECONDS` most: a job that starved yesterday owes
    nothing to one that comes today. A job is blocked while it waits for a device and has none.
    """

    name: str
    limits: Limits
    at: float
    clients: set[int] = field(default_factory=set)
    elapsed: float = 0.0
    blocked: float = 0.0
    waiting: int = 0  # leases that wait
    holding: int = 0  # leases that are active

    def advance(self, now: float) -> None:
        """Account for the time until now; to be called before `waiting` or `holding` change."""
        dt = now - self.at
        if dt <= 0:
            return
        keep = exp(-dt / MEMORY_SECONDS)
        blocked = dt if self.waiting and not self.holding else 0.0
        self.elapsed = self.elapsed * keep + dt
        self.blocked = self.blocked * keep + blocked
        self.at = now
