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

from pymux import _core, calibrate, config
from pymux.errors import ConfigError, FrozenRegion, LeaseError, RegionError, UnknownRegion

OnEvict = Literal["keep", "discard"]
Swap = Literal["demand", "snapshot"]
Track = Literal["phases", "fingerprint"]

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
    duplex = calibrate.link(device, settings.runtime_dir)["duplex"]
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
        duplex=duplex,
        poison=settings.check,
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
        self._open: Phase | None = None
        self._filling: list[str] = []  # regions whose blocks (or adopt() calls) are open
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

    def region(
        self, name: str, *, on_evict: OnEvict | None = None, frozen: bool | None = None, track: Track | None = None
    ) -> Region:
        """Return the region of this name, creating it the first time; later calls may leave its options out.

        Args:
            name: any text; ``"weights"``, ``"optimizer"`` and ``"kv_cache"`` are usual.
            on_evict: ``"keep"`` (default): contents survive an eviction, in pinned host memory.
                ``"discard"``: pages are given away as they are, and contents are lost.
            frozen: True: only ``with mux.region(...)`` blocks and `adopt` write it, such as a base model's
                weights. Phases do not count it among what they write, so it is copied out once; in check
                mode a torch operation that would write it raises FrozenRegion.
            track: ``"phases"`` (default): every page counts as changed by a phase that `writes` the region.
                ``"fingerprint"``: at the end of such a phase each page's contents are compared with the
                copy by a 128-bit hash, on the device; for regions of which phases change a part.

        Raises:
            RegionError: it exists with other options.
        """
        region = self._regions.get(name)
        if region is None:
            if on_evict not in {None, "keep", "discard"}:
                raise RegionError(f"on_evict={on_evict!r}: use 'keep' or 'discard'.")
            if track not in {None, "phases", "fingerprint"}:
                raise RegionError(f"track={track!r}: use 'phases' or 'fingerprint'.")
            core = self._agent.create_region(name, on_evict != "discard", track == "fingerprint")
            region = self._regions[name] = Region(self, core, frozen=bool(frozen))
        for option, asked in (("on_evict", on_evict), ("frozen", frozen), ("track", track)):
            if asked is not None and getattr(region, option) != asked:
                raise RegionError(f"region {name!r} exists with {option}={getattr(region, option)!r}, not {asked!r}.")
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

    def state_dict(self, what: Any) -> dict[str, Any]:
        """Read a module's or an optimizer's ``state_dict()`` into host memory, without a lease.

        Args:
            what: anything with a ``state_dict()`` of tensors, plain or nested.

        Returns:
            The same structure with CPU copies of the tensors, read as `to_host` does; tensors that share
            storage are copied each. For ``torch.save`` between phases.

        Raises:
            ContentsLost: a tensor's pages were discarded.
        """
        return dict(self._torch_integration().state_dict(self, what))

    def region_of(self, ptr: int) -> Region | None:
        """Return the region that an address belongs to, or None."""
        return next((r for r in self._regions.values() if r.contains(ptr)), None)

    def evict(self, region: str | None = None) -> int:
        """Swap a region (or all of them) out now, outside a phase, and give its pages to others.

        Returns:
            Bytes of device memory given away; when it returns, they are free for other clients.

        Raises:
            HostOutOfMemory: the host has no room for it; what could not move is still on the device.
            LeaseError: a phase is open.
            UnknownRegion: there is none of this name.
        """
        return self._agent.evict(None if region is None else self._lookup([region])[0])

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
            writes: those whose contents may change; default all that are used and not frozen. A region not
                written moves out without a copy when the host has its contents already.
            lazy: regions (of `uses`, or beside them) that come in behind the body, in the order named;
                `Lease.require` waits for one.
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

    def filling(self, region: str) -> bool:
        """Whether a block or an adopt() of this region is open, which may write it though it is frozen."""
        return region in self._filling

    def why_absent(self, region: str) -> str | None:
        """Say why a region must not be touched now, and what to do; None where it may be."""
        p = self._open
        if p is None:
            return (
                "outside a phase, when its pages may be away. Do it inside 'with mux.phase(...)', or read the tensor "
                "with mux.to_host(tensor)."
            )
        if region in p.resident:
            return None
        if region in p.done:
            return f"after lease.done_with({region!r}), which gave its pages away. Say so later in phase {p.name!r}."
        if region in p.lazy:
            return f"before lease.require({region!r}): phase {p.name!r} has it in lazy=, and it may be on its way."
        return f"which phase {p.name!r} does not use, so that its pages may be away. Name it in uses=."

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
            under ``regions`` for each, in bytes: live (allocated); resident, of these clean and dirty;
            evicted, of these spilled to disk; discarded; lost (discarded ever); swapped out, of these
            written back in the background; swapped in, of these prefetched before the lease and streamed
            behind the body; avoided, and why: the copy was current (clean), the fingerprint had not
            changed (unchanged), no block was there (free), `Region.set_live` left it out (not_live), or
            contents need not survive (discarded).
        """
        return {"job": self.job, "name": self.name, **self._agent.stats()}

    def trace(self) -> dict[str, list[dict[str, Any]]]:
        """What happened when: phases, waits and swaps in seconds of CLOCK_MONOTONIC."""
        spans = [{"kind": k, "name": n, "begin": a, "end": b} for k, n, a, b in self._spans]
        swaps = [
            {
                "direction": "out" if s.out else "in",
                "background": s.background,
                "begin": s.begin,
                "end": s.end,
                "bytes": s.bytes,
            }
            for s in self._agent.spans()
        ]
        return {"spans": spans, "swaps": swaps}

    def trim_host(self) -> int:
        """Unpin host memory, and shorten the spill file, where no pages are; returns the bytes released."""
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
        eager = [n for n in (self._regions if p.uses is None else p.uses) if n not in p.lazy]
        uses, lazy = self._lookup(eager), self._lookup(p.lazy)
        written = [*eager, *p.lazy] if p.writes is None else p.writes
        self._lookup(written)
        frozen = [n for n in written if self._regions[n].frozen and n not in self._filling]
        if frozen and p.writes is not None:
            raise FrozenRegion(
                f"phase {p.name!r} names region {frozen[0]!r} in writes=, and the region is frozen. Leave it out, or "
                f"create the region without frozen=True."
            )
        writes = self._lookup([n for n in written if n not in frozen])
        begin = time.monotonic()
        self._agent.acquire(p.name, uses, lazy, writes, p.expect, -1.0 if p.timeout is None else p.timeout)
        p.entered = time.monotonic()
        p.resident, p.done = set(eager), set()
        self._open = p
        self._spans.append(("wait", p.name, begin, p.entered))

    def _leave(self, p: Phase) -> None:
        if self._torch is not None:
            self._torch.before_leave()
        ended = time.monotonic()
        self._open = None
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
        """Be inside a phase that may write `region`: the open one, or one of our own."""
        self._filling.append(region)
        try:
            if self._open is None:
                with self.phase(f"{what} {region}", uses=(region,)):
                    yield
            else:
                (core,) = self._lookup([region])
                self._agent.require(core)
                self._agent.touch(core)
                self._open.resident.add(region)
                yield
        finally:
            self._filling.remove(region)


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
        self.resident: set[str] = set()  # regions that the body may touch now
        self.done: set[str] = set()  # and those it said it is done with

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
            DeviceOutOfMemory: the device has no room for it.
        """
        core = self._used(region, "require")
        self._phase.mux._agent.require(core)  # noqa: SLF001
        self._phase.resident.add(region)

    def done_with(self, region: str) -> None:
        """Say that the rest of the phase does not touch a region.

        Waits for the device work submitted so far. Then what changed is written back while the phase goes on,
        and who waits for the device may have the region's pages.

        Raises:
            UnknownRegion: there is no such region, or the phase does not use it.
            LeaseError: the phase has ended.
        """
        core = self._used(region, "done_with")
        self._phase.resident.discard(region)
        self._phase.done.add(region)
        self._phase.mux._agent.done_with(core)  # noqa: SLF001

    def _used(self, region: str, call: str) -> _core.Region:
        p = self._phase
        (core,) = p.mux._lookup([region])  # noqa: SLF001
        if not p.mux.active:
            raise LeaseError(f"{call}({region!r}) after phase {p.name!r} ended.")
        if p.uses is not None and region not in p.uses and region not in p.lazy:
            raise UnknownRegion(f"phase {p.name!r} does not use region {region!r}; name it in uses= or lazy=.")
        return core

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

    def __init__(self, mux: Mux, core: _core.Region, *, frozen: bool) -> None:
        self.mux = mux
        self.core = core
        self.frozen = frozen
        self._entered: list[contextlib.ExitStack] = []

    @property
    def name(self) -> str:
        """Name of the region."""
        return self.core.name

    @property
    def on_evict(self) -> str:
        """``"keep"`` or ``"discard"``."""
        return self.core.on_evict

    @property
    def track(self) -> str:
        """``"phases"`` or ``"fingerprint"``."""
        return "fingerprint" if self.core.fingerprint else "phases"

    @property
    def base(self) -> int:
        """The region's first device address; it never changes."""
        return self.core.base

    def contains(self, ptr: int) -> bool:
        """Whether a device address is the region's."""
        return self.core.contains(ptr)

    def set_live(self, ranges: Iterable[tuple[int, int]] | None) -> None:
        """Say which contents must survive an eviction, until the next call; the rest is not moved.

        Call it between the last write and the end of the phase, as the used blocks of a KV cache become known.
        Blocks allocated later are live as a whole.

        Args:
            ranges: (offset, bytes) from `base`: for a tensor, ``(t.data_ptr() - region.base, t.nbytes)``.
                None: everything that is allocated, as at first.

        Raises:
            RegionError: a range is not within the region.
        """
        pairs = None if ranges is None else [(int(offset), int(size)) for offset, size in ranges]
        for offset, size in pairs or ():
            if offset < 0 or size < 0 or offset + size > self.core.size:
                raise RegionError(
                    f"set_live(): offset {offset} with {size} bytes is not in region {self.name!r}. Offsets count from "
                    f"region.base."
                )
        self.mux._agent.set_live(self.core, pairs)  # noqa: SLF001

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
