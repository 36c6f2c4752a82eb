"""A phase and the lease that it gives: what a body may do while it has the device.

What it is not: entering and leaving are the Mux's; these are what its caller holds meanwhile.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextlib import ContextDecorator
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any

from pymux import _core
from pymux.errors import ConfigError, LeaseError, UnknownRegion

if TYPE_CHECKING:
    from pymux.mux import Mux
    from pymux.region import Region

_MAX_NAMES = 1023  # bytes; the message to the members has room for so many
_MAX_REGIONS = 64  # a bit each, by which members say what they have


@dataclass(frozen=True, kw_only=True, slots=True)
class PhaseOptions:
    """What `Mux.phase` was told."""

    name: str
    uses: tuple[str, ...] | None
    writes: tuple[str, ...] | None
    lazy: tuple[str, ...]
    expect: float
    timeout: float | None
    priority: int
    overlap: bool
    devices: tuple[int, ...]

    def for_members(self) -> str:
        """The regions, as the group's other members are told (csrc/wire.h, Names).

        Raises:
            ConfigError: the names are too long.
        """
        used = ["U"] if self.uses is None else [f"u{n}" for n in self.uses if n not in self.lazy]
        written = ["W"] if self.writes is None else [f"w{n}" for n in self.writes]
        text = "\n".join([*used, *(f"l{n}" for n in self.lazy), *written])
        names = {*(self.uses or ()), *(self.writes or ()), *self.lazy}
        if len(text.encode()) > _MAX_NAMES or len(names) > _MAX_REGIONS:
            raise ConfigError(
                f"phase {self.name!r} names {len(names)} regions in {len(text.encode())} bytes; a group's phase has "
                f"room for {_MAX_REGIONS} and {_MAX_NAMES}. Use fewer, shorter names."
            )
        return text


@dataclass(frozen=True, kw_only=True, slots=True)
class Entry:
    """How a phase is entered: by which agent, with what, and what is resident then.

    `epoch`: how many regions there were; -1: good for one time.
    """

    epoch: int
    opener: _core.Agent
    request: _core.PhaseRequest
    eager: frozenset[str]


class Phase(ContextDecorator):
    """A phase of a Mux; see `Mux.phase`."""

    opener: _core.Agent

    def __init__(self, mux: Mux, options: PhaseOptions) -> None:
        self.mux = mux
        self.options = options
        self.entry: Entry | None = None
        self.entered = 0.0
        self.resident: set[str] = set()  # regions that the body may touch now
        self.done: set[str] = set()  # and those it said it is done with
        self.stream: contextlib.AbstractContextManager[Any] | None = None

    @property
    def name(self) -> str:
        """Name of the phase."""
        return self.options.name

    def _recreate_cm(self) -> Phase:
        return Phase(self.mux, self.options)

    def __enter__(self) -> Lease:
        self.mux._enter(self)  # noqa: SLF001 - two halves of one thing
        return Lease(self)

    def __exit__(self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None) -> None:
        if exc is not None and not self.mux.active:
            return  # the lease is gone already, such as when idle() did not get it back; exc says why
        self.mux._leave(self)  # noqa: SLF001

    def __repr__(self) -> str:
        return f"<Phase {self.name!r} of {self.mux.job!r}>"


class Lease:
    """The right to run on the device, while a phase is open."""

    def __init__(self, phase: Phase) -> None:
        self._phase = phase
        self._pressed = phase.opener.pressed

    @property
    def phase(self) -> str:
        """Name of the phase."""
        return self._phase.name

    @property
    def recalled(self) -> bool:
        """Whether somebody waits for the device."""
        return self._phase.mux.recalled

    def require(self, region: str) -> None:
        """Wait until a lazy region is resident.

        Raises:
            UnknownRegion: there is no such region, or the phase does not use it.
            LeaseError: the phase has ended.
            DeviceOutOfMemory: the device has no room for it.
        """
        r = self._used(region, "require")
        r.agent.require(r.core)
        self._phase.resident.add(region)

    def done_with(self, region: str) -> None:
        """Say that the rest of the phase does not touch a region.

        Waits for the device work submitted so far. Then what changed is written back while the phase goes on,
        and who waits for the device may have the region's pages.

        Raises:
            UnknownRegion: there is no such region, or the phase does not use it.
            LeaseError: the phase has ended.
        """
        r = self._used(region, "done_with")
        self._phase.resident.discard(region)
        self._phase.done.add(region)
        r.agent.done_with(r.core)

    def _used(self, region: str, call: str) -> Region:
        p, o = self._phase, self._phase.options
        p.mux._lookup([region])  # noqa: SLF001
        if not p.mux.active:
            raise LeaseError(f"{call}({region!r}) after phase {p.name!r} ended.")
        if o.uses is not None and region not in o.uses and region not in o.lazy:
            raise UnknownRegion(f"phase {p.name!r} does not use region {region!r}; name it in uses= or lazy=.")
        return p.mux.regions[region]

    @contextlib.contextmanager
    def idle(self, expect: float = 0.0) -> Iterator[None]:
        """Lend the device out for the length of a ``with`` block inside the phase.

        Tensors of regions must not be touched inside the block.

        Args:
            expect: seconds that the block is expected to take. Until then only phases run that are expected to be
                over by then, and this one is next after them. 0: unknown; whoever waits may run.

        Raises:
            ConfigError: `expect` is negative.
        """
        if not expect >= 0:
            raise ConfigError(f"idle(expect={expect!r}): give seconds.")
        mux = self._phase.mux
        mux._leave(self._phase, end=False, back=expect)  # noqa: SLF001
        try:
            yield
        finally:
            mux._enter(self._phase, resumes=True)  # noqa: SLF001

    def yield_point(self) -> bool:
        """Let a waiting job run here, if the broker's policy says so; returns whether the device was away.

        Otherwise it costs well under a microsecond, and is for the inside of loops: between decode steps or
        micro-batches.
        """
        if not self._pressed():
            return False
        with self.idle():
            pass
        return True

    def __repr__(self) -> str:
        return f"<Lease of phase {self.phase!r}{', recalled' if self.recalled else ''}>"
