"""What a user calls: connect(), and the Mux with its regions, phases and leases.

What it is not: it moves no pages (the extension does) and knows no framework (integrations do).
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import os
import sys
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ContextDecorator
from types import TracebackType
from typing import Any, Literal

from pymux import _core, config
from pymux.errors import ConfigError, LeaseError, RegionError, UnknownRegion

OnEvict = Literal["keep", "discard"]
Swap = Literal["demand", "snapshot"]

_TRACE_LENGTH = 65536  # spans that a Mux remembers


def connect(
    job: str,
    *,
    name: str = "main",
    device: int = 0,
    swap: Swap = "demand",
    start_broker: bool = True,
    connect_timeout: float = 10.0,
) -> Mux:
    """Join this node's broker, starting it if none answers.

    Args:
        job: name of the run, the same in all its processes; at most 63 bytes of UTF-8.
        name: name of this process within the job; at most 63 bytes.
        device: ordinal of the CUDA device, as the driver counts them.
        swap: ``"demand"`` moves only the pages that must move. ``"snapshot"`` swaps everything out
            at every yield, as whole-process checkpoints do; it is there to compare with.
        start_broker: start a broker when none answers.
        connect_timeout: seconds to wait for one.

    Returns:
        The connection; close it, use it as a context manager, or leave it to the process's end.

    Raises:
        ConfigError: a name or a setting is not usable.
        DriverError: no usable driver or device.
        BrokerLost: no broker answers and none could be started.
        ClientExists: this job has a process of this name already.
        VersionMismatch: the broker is of another version.
    """
    for what, value in (("job", job), ("name", name)):
        if not value or len(value.encode()) > 63 or "\0" in value:
            raise ConfigError(f"{what}={value!r}: give a name of 1 to 63 bytes.")
    if swap not in {"demand", "snapshot"}:
        raise ConfigError(f"swap={swap!r}: use 'demand' or 'snapshot'.")
    settings = config.load()
    driver = _core.load_driver(settings.driver)
    spawn = [sys.executable, "-m", "pymux.cli", "broker", "--background", "--driver", driver]
    agent = _core.Agent(
        socket=str(settings.socket),
        spawn=spawn if start_broker else [],
        job=job,
        client=name,
        group=name,
        rank=0,
        world=1,
        device=device,
        page_size=settings.page_size,
        pass_pages=settings.pass_pages,
        snapshot=swap == "snapshot",
        connect_timeout=connect_timeout,
    )
    return Mux(agent, job=job, name=name, ordinal=device, check=settings.check)


class Mux:
    """A process's connection to the broker, its regions and its lease.

    Attributes:
        job: name of the run.
        name: name of this process.
        ordinal: of the CUDA device.
    """

    def __init__(self, agent: _core.Agent, *, job: str, name: str, ordinal: int, check: bool = False) -> None:
        self.job = job
        self.name = name
        self.ordinal = ordinal
        self._agent = agent
        self._regions: dict[str, Region] = {}
        self._spans: deque[tuple[str, str, float, float]] = deque(maxlen=_TRACE_LENGTH)
        self._torch: Any = None
        self._check: Any = None
        self._pid = os.getpid()
        if not faulthandler.is_enabled() and sys.stderr is not None:
            # Region faults then come with Python's traceback. Without a real stderr it cannot be had.
            with contextlib.suppress(ValueError, OSError):
                faulthandler.enable()
        atexit.register(self.close)
        if check:
            from pymux.integrations import torch as integration  # noqa: PLC0415 - optional

            self._check = integration.check_mode(self)
            self._check.__enter__()

    # ---- regions -------------------------------------------------------------------------------

    def region(self, name: str, *, on_evict: OnEvict | None = None) -> Region:
        """Return the region of this name, creating it the first time.

        Args:
            name: any text; ``"weights"``, ``"optimizer"`` and ``"kv_cache"`` are usual.
            on_evict: ``"keep"`` (default): contents survive an eviction, in pinned host memory.
                ``"discard"``: pages are given away as they are, and contents are lost.

        Raises:
            RegionError: it exists with another `on_evict`.
        """
        region = self._regions.get(name)
        if region is None:
            if on_evict not in {None, "keep", "discard"}:
                raise RegionError(f"on_evict={on_evict!r}: use 'keep' or 'discard'.")
            region = Region(self, self._agent.create_region(name, on_evict != "discard"))
            self._regions[name] = region
        elif on_evict is not None and region.on_evict != on_evict:
            raise RegionError(f"region {name!r} exists with on_evict={region.on_evict!r}, not {on_evict!r}.")
        return region

    @property
    def regions(self) -> dict[str, Region]:
        """The regions by name."""
        return dict(self._regions)

    def adopt(self, what: Any, region: str = "weights") -> Any:
        """Move existing tensors into a region, keeping the Python objects.

        Args:
            what: a tensor, a torch module (parameters and buffers), an optimizer (its state, also
                what its first ``step()`` creates), or an iterable of tensors.
            region: name of the region; created if new.

        Returns:
            `what` itself.

        Raises:
            DeviceOutOfMemory: the device has no room.
            TypeError: `what` has no tensors.
        """
        self._torch_integration().adopt(self.region(region), what)
        return what

    def to_host(self, tensor: Any) -> Any:
        """Read a region's tensor from wherever its contents are, without a lease.

        Args:
            tensor: a torch tensor of any shape and dtype; outside regions it is copied as usual.

        Returns:
            A new CPU tensor of the same shape and dtype.

        Raises:
            ContentsLost: its pages were discarded.
        """
        return self._torch_integration().to_host(self, tensor)

    def region_of(self, ptr: int) -> Region | None:
        """Return the region that an address belongs to, or None."""
        return next((r for r in self._regions.values() if r.contains(ptr)), None)

    def evict(self, region: str | None = None) -> None:
        """Swap a region (or all of them) out now, outside a phase, and give its pages to others.

        Raises:
            HostOutOfMemory: the host has no room for it; what could not move is still on the device.
            LeaseError: a phase is open.
            UnknownRegion: there is none of this name.
        """
        self._agent.evict(None if region is None else self._lookup([region])[0])

    # ---- phases --------------------------------------------------------------------------------

    def phase(
        self,
        name: str,
        *,
        uses: Iterable[str] | None = None,
        writes: Iterable[str] | None = None,
        lazy: Iterable[str] = (),
        expect: float = 0.0,
        timeout: float | None = None,
    ) -> Phase:
        """A stretch of device work; a context manager, or a decorator.

        Entering waits until the device is this process's and the regions are resident. Leaving
        waits for the device work of the phase. Phases do not nest.

        Args:
            name: such as ``"rollout"`` or ``"train"``.
            uses: names of the regions that must be resident; default all.
            writes: those whose contents may change; default `uses`. A region not written moves out
                without a copy when the host has its contents already.
            lazy: regions of `uses` (added to it) that the body asks for with `Lease.require`.
            expect: expected seconds, for the scheduler.
            timeout: seconds to wait for the device; None waits as long as it takes.
        """
        return Phase(
            self,
            name,
            uses=None if uses is None else tuple(uses),
            writes=None if writes is None else tuple(writes),
            lazy=tuple(lazy),
            expect=expect,
            timeout=timeout,
        )

    @property
    def active(self) -> bool:
        """Whether a phase is open."""
        return self._agent.active

    @property
    def recalled(self) -> bool:
        """Whether somebody waits for the device that this process holds."""
        return self._agent.recalled

    @property
    def outside_bytes(self) -> int:
        """Bytes that torch holds on the device outside regions, such as activations; they stay."""
        return int(self._torch_integration().outside_bytes())

    @property
    def device(self) -> Any:
        """The torch device of this connection."""
        return self._torch_integration().device

    @property
    def host_addressable(self) -> bool:
        """Whether host code can touch the device's memory directly."""
        return self._agent.host_addressable

    @property
    def uuid(self) -> bytes:
        """The device's UUID, 16 bytes."""
        return self._agent.uuid

    def stats(self) -> dict[str, Any]:
        """Pages, bytes and counts of this process, as plain data.

        Returns:
            ``phase`` (idle, waiting, active, parked), ``generation``, page counts, host bytes, and
            under ``regions`` for each the bytes live, resident, clean, dirty, evicted, discarded,
            swapped out and in, and avoided.
        """
        return {"job": self.job, "name": self.name, **self._agent.stats()}

    def trace(self) -> dict[str, list[dict[str, Any]]]:
        """What happened when: phases, waits and swaps in seconds of CLOCK_MONOTONIC."""
        spans = [{"kind": k, "name": n, "begin": a, "end": b} for k, n, a, b in self._spans]
        swaps = [
            {"direction": "out" if s.out else "in", "begin": s.begin, "end": s.end, "bytes": s.bytes}
            for s in self._agent.spans()
        ]
        return {"spans": spans, "swaps": swaps}

    def trim_host(self) -> int:
        """Unpin host memory that holds no pages; returns the bytes released."""
        return self._agent.trim_host()

    def close(self) -> None:
        """Give lease and pages back. Contents of the regions are gone. Idempotent."""
        if os.getpid() != self._pid:
            return  # a fork of the process that connected
        atexit.unregister(self.close)
        if self._check is not None:
            check, self._check = self._check, None
            check.__exit__(None, None, None)
        self._agent.close()

    def __enter__(self) -> Mux:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        s = self._agent.stats()
        mib = s["pages_held"] * s["page_size"] / 2**20
        return f"<Mux {self.job}/{self.name}: {s['phase']}, {mib:.0f} MiB on the device, regions {list(self._regions)}>"

    # ---- for Phase and Region --------------------------------------------------------------------

    def _lookup(self, names: Sequence[str]) -> list[_core.Region]:
        missing = [n for n in names if n not in self._regions]
        if missing:
            known = ", ".join(map(repr, self._regions)) or "none"
            raise UnknownRegion(
                f"no region {missing[0]!r} in job {self.job!r}; it has {known}. Create it with mux.region(...) first."
            )
        return [self._regions[n].core for n in names]

    def _enter(self, p: Phase) -> None:
        names = tuple(self._regions) if p.uses is None else p.uses + tuple(n for n in p.lazy if n not in p.uses)
        uses = self._lookup(names)
        writes = uses if p.writes is None else self._lookup(p.writes)
        begin = time.monotonic()
        self._agent.acquire(p.name, uses, writes, p.expect, -1.0 if p.timeout is None else p.timeout)
        p.entered = time.monotonic()
        self._spans.append(("wait", p.name, begin, p.entered))

    def _leave(self, p: Phase) -> None:
        if self._torch is not None:
            self._torch.before_leave()
        ended = time.monotonic()
        try:
            self._agent.leave()
        finally:
            self._spans.append(("phase", p.name, p.entered, ended))

    def _torch_integration(self) -> Any:
        if self._torch is None:
            try:
                from pymux.integrations import torch as integration  # noqa: PLC0415 - torch is optional
            except ImportError as e:
                raise ConfigError(f"this needs torch ({e}). Install it: pip install 'pymux-cuda[torch]'.") from e
            self._torch = integration.Integration(self)
        return self._torch

    @contextlib.contextmanager
    def _lease_for(self, region: str, what: str) -> Iterator[None]:
        """Be inside a phase: the open one, or one of our own for `region`."""
        if self.active:
            yield
        else:
            with self.phase(f"{what} {region}", uses=(region,)):
                yield


class Phase(ContextDecorator):
    """A phase of a Mux; see `Mux.phase`."""

    def __init__(
        self,
        mux: Mux,
        name: str,
        *,
        uses: tuple[str, ...] | None,
        writes: tuple[str, ...] | None,
        lazy: tuple[str, ...],
        expect: float,
        timeout: float | None,
    ) -> None:
        self.mux = mux
        self.name = name
        self.uses = uses
        self.writes = writes
        self.lazy = lazy
        self.expect = expect
        self.timeout = timeout
        self.entered = 0.0

    def _recreate_cm(self) -> Phase:
        return Phase(
            self.mux,
            self.name,
            uses=self.uses,
            writes=self.writes,
            lazy=self.lazy,
            expect=self.expect,
            timeout=self.timeout,
        )

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
        """
        p = self._phase
        p.mux._lookup([region])  # noqa: SLF001
        if not p.mux.active:
            raise LeaseError(f"require({region!r}) after phase {p.name!r} ended.")
        if p.uses is not None and region not in p.uses and region not in p.lazy:
            raise UnknownRegion(f"phase {p.name!r} does not use region {region!r}; name it in uses= or lazy=.")

    @contextlib.contextmanager
    def idle(self) -> Iterator[None]:
        """Lend the device out for the length of a ``with`` block inside the phase.

        Tensors of regions must not be touched inside the block.
        """
        mux = self._phase.mux
        mux._leave(self._phase)  # noqa: SLF001
        try:
            yield
        finally:
            mux._enter(self._phase)  # noqa: SLF001

    def yield_point(self) -> bool:
        """Let a waiting job run here, if there is one; returns whether the device was away."""
        if not self.recalled:
            return False
        with self.idle():
            pass
        return True

    def __repr__(self) -> str:
        return f"<Lease of phase {self.phase!r}{', recalled' if self.recalled else ''}>"


class Region:
    """A named part of the device's memory whose pages come and go, at fixed addresses.

    As a context manager: torch's allocations in the block come from the region, under a lease.
    """

    def __init__(self, mux: Mux, core: _core.Region) -> None:
        self.mux = mux
        self.core = core
        self._entered: list[contextlib.ExitStack] = []

    @property
    def name(self) -> str:
        """Name of the region."""
        return self.core.name

    @property
    def on_evict(self) -> str:
        """``"keep"`` or ``"discard"``."""
        return self.core.on_evict

    def contains(self, ptr: int) -> bool:
        """Whether a device address is the region's."""
        return self.core.contains(ptr)

    def allocate(self, nbytes: int) -> _core.Block:
        """Allocate a block for raw use, inside a phase; it is freed when the object is dropped.

        Args:
            nbytes: at least 1; the block is 256-byte aligned.

        Returns:
            Its address and size, and a buffer where the host can address the device.

        Raises:
            DeviceOutOfMemory: the device has no room.
            LeaseError: no phase is open.
        """
        return self.mux._agent.allocate(self.core, nbytes)  # noqa: SLF001

    def read(self, ptr: int, to: Any) -> None:
        """Copy contents at a device address into a writable buffer, without a lease.

        Raises:
            ContentsLost: the pages were discarded.
        """
        self.mux._agent.read(self.core, ptr, to)  # noqa: SLF001

    @contextlib.contextmanager
    def serving_torch_allocator(self) -> Iterator[None]:
        """Serve this thread's calls of the extension's pluggable torch allocator from the region."""
        _core.torch_enter(self.mux._agent, self.core)  # noqa: SLF001
        try:
            yield
        finally:
            _core.torch_leave()

    def __enter__(self) -> Region:
        with contextlib.ExitStack() as stack:
            stack.enter_context(self.mux._lease_for(self.name, "region"))  # noqa: SLF001
            if "torch" in sys.modules:
                stack.enter_context(self.mux._torch_integration().allocating(self))  # noqa: SLF001
            self._entered.append(stack.pop_all())
        return self

    def __exit__(self, *exc: object) -> None:
        self._entered.pop().close()

    def __repr__(self) -> str:
        s = self.mux.stats()["regions"][self.name]
        return (
            f"<Region {self.name!r}, on_evict={self.on_evict!r}: {s['live_bytes'] / 2**20:.1f} MiB allocated, "
            f"{s['resident_bytes'] / 2**20:.0f} MiB resident, {s['evicted_bytes'] / 2**20:.0f} MiB evicted>"
        )
