"""Who is next: the order of the waiting requests. Pure; time is an argument."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """A group that waits for its devices."""

    group: tuple[str, str]
    client: int
    seq: int
    phase: str
    devices: frozenset[str]
    arrived: float
    expected: float


class Policy(Protocol):
    """Orders requests; the first that fits its devices is granted."""

    name: str

    def order(self, waiting: Sequence[Request], now: float) -> list[Request]:
        """Return the requests, most urgent first.

        Args:
            waiting: the requests in the order of their arrival.
            now: seconds.
        """


class Fifo:
    """First come, first served: nobody is ever overtaken on the same devices."""

    name = "fifo"

    def order(self, waiting: Sequence[Request], now: float) -> list[Request]:  # noqa: ARG002 - the protocol's
        """Return the requests as they came."""
        return list(waiting)
