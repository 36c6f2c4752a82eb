"""What a user calls: connect(), and the Mux that makes regions and phases.

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
from typing import Any, Literal

from pymux import _core, calibrate, config, run
from pymux.errors import ConfigError, FrozenRegion, RegionError, UnknownRegion
from pymux.phase import Entry, Phase, PhaseOptions
from pymux.region import Region
from pymux.shared import SharedRegion, segment_of

OnEvict = Literal["keep", "discard"]
Swap = Literal["demand", "snapshot"]
Track = Literal["phases", "fingerprint"]

_TRACE_LENGTH = 65536  # spans that a Mux remembers
_MAX_ENTRIES = 256
_RUN: set[int] = set()  # devices whose connection of 'pymux run' has its Mux
_SUMS = ("pages_held", "pages_spare", "host_pinned_bytes", "host_used_bytes", "host_granted_bytes")


def connect(
    job: str,
    *,
    name: str = "main",
    device: int = 0,
    devices: Sequence[int] | None = None,
    group: str | None = None,
    rank: int = 0,
    world: int = 1,
    controller: bool = False,
    device_memory: int | str = 0,
    host_memory: int | str = 0,
    swap: Swap = "demand",
    start_broker: bool = True,
    connect_timeout: float = 10.0,
) -> Mux:
    """Join this node's broker, starting it if none answers.

    Processes of a job that hold their devices together form a group: the ranks of a trainer, the workers of an
    inference engine. Its members open the same phases in the same order, or leave that to one of them, or to a
    controller. A phase begins when all members' regions are resident, and ends when all have drained their devices.

    Args:
        job: name of the run, the same in all its processes; at most 63 bytes of UTF-8.
        name: name of this process within the job; at most 63 bytes. In a group: default the group's and the rank.
        device: ordinal of the CUDA device, as the driver counts them.
        devices: ordinals of several devices that this one process uses; phases get all of them, or none.
        group: name of the group that this process is a member of; at most 63 bytes.
        rank: of this process in the group, from 0.
        world: how many members with a device the group has.
        controller: whether this process has no device memory, and only opens phases of its `group`.
        device_memory: the most that a phase of this process will need on the device, in bytes or such as ``"20G"``;
            0: unknown. What can never fit is refused here instead of later.
        host_memory: the same of pinned host memory, for all that this process may have swapped out.
        swap: ``"demand"`` moves only the pages that must move. ``"snapshot"`` swaps everything out
            at every yield, as whole-process checkpoints do; it is there to compare with.
        start_broker: start a broker when none answers.
        connect_timeout: seconds to wait for one.

    Returns:
        The connection; close it, use it as a context manager, or leave it to the process's end.

    Raises:
        CapacityError: `device_memory` is more than the device has, or the job may have.
        ConfigError: a name or a setting is not usable.
        HostOutOfMemory: `host_memory` is more than the node has for this, or the job may have.
        DriverError: no usable driver or device.
        BrokerLost: no broker answers and none could be started.
        ClientExists: this job has a process of this name already.
        VersionMismatch: the broker is of another version.
    """
    if group is not None:
        name = f"{group}.controller" if controller and name == "main" else name if name != "main" else f"{group}.{rank}"
    for what, value in (("job", job), ("name", name), ("group", name if group is None else group)):
        config.check_name(what, value)
    if swap not in {"demand", "snapshot"}:
        raise ConfigError(f"swap={swap!r}: use 'demand' or 'snapshot'.")
    if devices is not None and (group is not None or not devices or len(set(devices)) < len(devices)):
        raise ConfigError(f"devices={list(devices)!r}: give different ordinals, and no group= beside them.")
    if controller and group is None:
        raise ConfigError("controller=True: say of which group=.")
    if not 0 <= rank < world or (devices and world > 1):
        raise ConfigError(f"rank={rank}, world={world}: ranks count from 0 to world - 1, and need a group=.")
    if group is None and world > 1:
        raise ConfigError(f"world={world}: say of which group=.")
    settings = config.load()
    driver = _core.load_driver(settings.driver)
    plain = name == "main" and group is None and devices is None and swap == "demand"
    plain = plain and not device_memory and not host_memory
    if settings.run and plain and job == settings.job and (mux := _join_run(job, device, check=settings.check)):
        return mux
    spawn = run.broker_command(driver)
    ordinals = list(devices) if devices else [device]
    agents: list[_core.Agent] = []
    try:
        for i, ordinal in enumerate(ordinals):
            agents.append(
                _core.Agent(
                    socket=str(settings.socket),
                    spawn=spawn if start_broker else [],
                    job=job,
                    client=f"{name}.{ordinal}" if devices else name,
                    group=group or name,
                    rank=i if devices else rank,
                    world=len(devices) if devices else world,
                    joint=bool(devices or group),
                    device=ordinal,
                    controller=controller,
                    page_size=settings.page_size,
                    need=_bytes(device_memory),
                    host_need=_bytes(host_memory),
                    pass_pages=settings.pass_pages,
                    snapshot=swap == "snapshot",
                    duplex=controller or calibrate.link(ordinal, settings.runtime_dir)["duplex"],
                    poison=settings.check,
                    connect_timeout=connect_timeout,
                )
            )
    except BaseException:
        for agent in agents:
            agent.close()
        raise
    return Mux(agents, job=job, name=name, ordinals=ordinals, joint=bool(devices or group), check=settings.check)


def _join_run(job: str, device: int, *, check: bool) -> Mux | None:
    """The connection that 'pymux run' has made, or would make, for cudaMalloc; once for each device."""
    if device in _RUN:
        return None
    _RUN.add(device)
    agent, core = _core.served(device)
    mux = Mux([agent], job=job, name=f"run.{os.getpid()}", ordinals=[device], check=check)
    mux._add(Region(mux, core, 0, frozen=False))  # noqa: SLF001 - two halves of one thing
    return mux


def _bytes(size: int | str) -> int:
    return config.parse_size(size) if isinstance(size, str) else size


class Mux:
    """A process's connection to the broker, its regions and its lease.

    Attributes:
        job: name of the run.
        name: name of this process.
        ordinals: of the CUDA devices.
    """

    def __init__(
        self,
        agents: Sequence[_core.Agent],
        *,
        job: str,
        name: str,
        ordinals: Sequence[int],
        joint: bool = False,
        check: bool = False,
    ) -> None:
        self.job = job
        self.name = name
        self.ordinals = list(ordinals)
        self._agents = list(agents)
        self._agent = self._agents[0]
        self._joint = joint
        self._regions: dict[str, Region] = {}
        self._spans: deque[tuple[str, str, float, float]] = deque(maxlen=_TRACE_LENGTH)
        self._torch: Any = None
        self._open: Phase | None = None
        self._epoch = 0
        self._entries: dict[PhaseOptions, Entry] = {}  # of phases that were entered with the regions of now
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
        self,
        name: str,
        *,
        device: int | None = None,
        on_evict: OnEvict | None = None,
        frozen: bool | None = None,
        track: Track | None = None,
    ) -> Region:
        """Return the region of this name, creating it the first time; later calls may leave its options out.

        Args:
            name: any text of one line; ``"weights"``, ``"optimizer"`` and ``"kv_cache"`` are usual.
            device: ordinal of the device that it is on; default the first.
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
        at = self._at(device)
        if region is None:
            if not name or "\n" in name:
                raise RegionError(f"region {name!r}: give a name of one line.")
            if on_evict not in {None, "keep", "discard"}:
                raise RegionError(f"on_evict={on_evict!r}: use 'keep' or 'discard'.")
            if track not in {None, "phases", "fingerprint"}:
                raise RegionError(f"track={track!r}: use 'phases' or 'fingerprint'.")
            core = self._agents[at].create_region(name, on_evict != "discard", track == "fingerprint", bool(frozen))
            region = Region(self, core, at, frozen=bool(frozen))
            self._add(region)
        for option, asked in (("on_evict", on_evict), ("frozen", frozen), ("track", track), ("device", device)):
            if asked is not None and getattr(region, option) != asked:
                raise RegionError(f"region {name!r} exists with {option}={getattr(region, option)!r}, not {asked!r}.")
        return region

    def open_shared(
        self, token: str, *, name: str | None = None, writable: bool = False, device: int | None = None
    ) -> SharedRegion:
        """Map a region that another process of this node shares: the same memory, at this process's addresses.

        Args:
            token: what `Region.share` returned there.
            name: of the region here; default its name there.
            writable: False: an access that writes it is an error, as far as the driver can make it one; phases do
                not count it among what they write.
            device: ordinal of the device that it is on; default the first.

        Returns:
            The region; name it in ``uses`` of phases.

        Raises:
            ConfigError: `token` is none.
            RegionError: nobody has it any more, it is on another device, or this process has a region of that name.
        """
        at = self._at(device)
        core = self._agents[at].open_shared(segment_of(token), name or "", writable)
        region = SharedRegion(self, core, at, frozen=not writable)
        self._add(region)
        return region

    def _at(self, device: int | None) -> int:
        """Index of a device's agent; of the first without one."""
        if device is None:
            return 0
        if device not in self.ordinals:
            raise RegionError(f"device={device!r}: this process uses {self.ordinals}.")
        return self.ordinals.index(device)

    def _add(self, region: Region) -> None:
        self._regions[region.name] = region
        self._entries.clear()
        self._epoch += 1

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
        if region is not None:
            (core,) = self._lookup([region])
            return self._regions[region].agent.evict(core)
        return sum(agent.evict(None) for agent in self._agents)

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
        priority: int = 0,
        overlap: bool = False,
        devices: Iterable[int] | None = None,
    ) -> Phase:
        """A stretch of device work; a context manager, or a decorator.

        Entering waits until the device is this process's and the regions are resident. Leaving
        waits for the device work of the phase. Phases do not nest.

        Args:
            name: such as ``"rollout"`` or ``"train"``.
            uses: names of the regions that must be resident, in any process of the group; default all.
            writes: those whose contents may change; default all that are used and not frozen. A region not
                written moves out without a copy when the host has its contents already.
            lazy: regions (of `uses`, or beside them) that come in behind the body, in the order named;
                `Lease.require` waits for one.
            expect: expected seconds, for the scheduler; 0: as earlier phases of this name took.
            timeout: seconds to wait for the device; None waits as long as it takes.
            priority: as CUDA counts: smaller is more urgent, 0 usual. The body's torch work runs on a stream of
                this priority (0 for those above), and the broker's policy ``priority`` goes by it.
            overlap: whether the phase may run beside a more urgent one when both fit, instead of waiting for it.
            devices: ordinals of the devices that it needs, of a Mux with several; default all.
        """
        if not isinstance(priority, int):
            raise ConfigError(f"priority={priority!r}: give an integer; smaller is more urgent.")
        if not expect >= 0:
            raise ConfigError(f"expect={expect!r}: give seconds.")
        on = self.ordinals if devices is None else list(devices)
        if not on or not set(on) <= set(self.ordinals):
            raise ConfigError(f"devices={on!r}: this process uses {self.ordinals}.")
        return Phase(
            self,
            PhaseOptions(
                name=name,
                uses=None if uses is None else tuple(uses),
                writes=None if writes is None else tuple(writes),
                lazy=tuple(lazy),
                expect=expect,
                timeout=timeout,
                priority=priority,
                overlap=overlap,
                devices=tuple(on),
            ),
        )

    @property
    def active(self) -> bool:
        """Whether a phase is open, here or in another process of the group."""
        return any(agent.active for agent in self._agents)

    def filling(self, region: str) -> bool:
        """Whether a block or an adopt() of this region is open, which may write it though it is frozen."""
        return region in self._filling

    def why_absent(self, region: str) -> str | None:
        """Say why a region must not be touched now, and what to do; None where it may be."""
        p = self._open
        if p is None:
            used = self._regions[region].agent.remote_uses
            if used is not None:
                if region in used:
                    return None
                return "which the phase that another process of the group has open does not use. Name it in uses=."
            return (
                "outside a phase, when its pages may be away. Do it inside 'with mux.phase(...)', or read the tensor "
                "with mux.to_host(tensor)."
            )
        if region in p.resident:
            return None
        if region in p.done:
            return f"after lease.done_with({region!r}), which gave its pages away. Say so later in phase {p.name!r}."
        if region in p.options.lazy:
            return f"before lease.require({region!r}): phase {p.name!r} has it in lazy=, and it may be on its way."
        return f"which phase {p.name!r} does not use, so that its pages may be away. Name it in uses=."

    @property
    def recalled(self) -> bool:
        """Whether somebody waits for the device that this process holds."""
        return any(agent.recalled for agent in self._agents)

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
            ``phase`` (idle, waiting, active, parked, leaving), ``generation``, page counts, host bytes, and
            under ``regions`` for each, in bytes: live (allocated); resident, of these clean and dirty;
            borrowed (shared, mapped here, and counted for another process); evicted, of these spilled to
            disk; discarded; lost (discarded ever); swapped out, of these written back in the background;
            swapped in, of these prefetched before the lease and streamed behind the body; avoided, and
            why: the copy was current (clean), the fingerprint had not changed (unchanged), no block was
            there (free), `Region.set_live` left it out (not_live), or contents need not survive
            (discarded). With several devices: counts and bytes of all of them, the rest of the first.
        """
        first, *others = [agent.stats() for agent in self._agents]
        for stats in others:
            first["regions"].update(stats["regions"])
            for key in _SUMS:
                first[key] += stats[key]
        return {"job": self.job, "name": self.name, **first}

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
            for agent in self._agents
            for s in agent.spans()
        ]
        return {"spans": spans, "swaps": swaps}

    def trim_host(self) -> int:
        """Unpin host memory, and shorten the spill file, where no pages are; returns the bytes released."""
        return sum(agent.trim_host() for agent in self._agents)

    def close(self) -> None:
        """Give lease and pages back. Contents of the regions are gone. Idempotent."""
        if os.getpid() != self._pid:
            return  # a fork of the process that connected
        atexit.unregister(self.close)
        if self._check is not None:
            check, self._check = self._check, None
            check.__exit__(None, None, None)
        for agent in self._agents:
            agent.close()

    def __enter__(self) -> Mux:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        s = self.stats()
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

    def _prepare(self, o: PhaseOptions) -> Entry:
        """What a phase of these options needs, with the regions that there are now."""
        on = [self.ordinals.index(d) for d in o.devices]
        here = [n for n, r in self._regions.items() if r.at in on]
        eager = [n for n in (here if o.uses is None else o.uses) if n not in o.lazy]
        written = [*eager, *o.lazy] if o.writes is None else o.writes
        if not self._joint:
            self._lookup([*eager, *o.lazy, *written])  # in a group others may have them
        frozen = [n for n in written if n in self._regions and self._regions[n].frozen and n not in self._filling]
        if frozen and o.writes is not None:
            raise FrozenRegion(
                f"phase {o.name!r} names region {frozen[0]!r} in writes=, and the region is frozen. Leave it out, or "
                f"create the region without frozen=True."
            )
        opener = self._agents[on[0]]

        def mine(names: Iterable[str]) -> list[_core.Region]:
            found = [self._regions[n] for n in names if n in self._regions]
            return [r.core for r in found if r.agent is opener]

        request = _core.PhaseRequest(
            name=o.name,
            uses=mine(eager),
            lazy=mine(o.lazy),
            writes=mine(n for n in written if n not in frozen),
            regions=o.for_members() if self._joint else "",
            expected=o.expect,
            timeout=-1.0 if o.timeout is None else o.timeout,
            priority=o.priority,
            overlap=o.overlap,
            ranks=0 if len(on) == len(self._agents) else sum(1 << i for i in on),
        )
        epoch = -1 if self._filling else self._epoch
        return Entry(epoch=epoch, opener=opener, request=request, eager=frozenset(eager) & self._regions.keys())

    def _entry(self, o: PhaseOptions) -> Entry:
        if self._filling:
            return self._prepare(o)  # frozen regions may be written, this time
        entry = self._entries.get(o)
        if entry is None:
            if len(self._entries) >= _MAX_ENTRIES:  # of a loop that says something new each time
                self._entries.clear()
            entry = self._entries[o] = self._prepare(o)
        return entry

    def _enter(self, p: Phase, *, resumes: bool = False) -> None:
        o = p.options
        entry = p.entry
        if entry is None or entry.epoch != self._epoch:
            entry = self._entry(o)
            p.entry = entry
        p.opener = opener = entry.opener
        p.resident, p.done = set(entry.eager), set()
        begin = time.monotonic()
        opener.acquire(entry.request, resumes)
        p.entered = time.monotonic()  # between acquire() and the body every line counts: caches are cold
        self._open = p
        self._spans.append(("wait", o.name, begin, p.entered))
        if o.priority:
            p.stream = self._torch_stream(o.priority)
            p.stream.__enter__()

    def _leave(self, p: Phase, *, end: bool = True, back: float = 0.0) -> None:
        if p.stream is not None:
            stream, p.stream = p.stream, None
            stream.__exit__(None, None, None)
        if self._torch is not None:
            self._torch.before_leave()
        ended = time.monotonic()
        self._open = None
        try:
            p.opener.leave(end, back)
        finally:
            self._spans.append(("phase", p.name, p.entered, ended))

    def _torch_stream(self, priority: int) -> contextlib.AbstractContextManager[Any]:
        """A stream for a phase's body; without torch there is nothing that would run on it."""
        if "torch" not in sys.modules:
            return contextlib.nullcontext()
        stream: contextlib.AbstractContextManager[Any] = self._torch_integration().stream(priority)
        return stream

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
            r = self._regions[region]
            if self._open is None and r.agent.remote_uses is None:
                with self.phase(f"{what} {region}", uses=(region,), devices=(self.ordinals[r.at],)):
                    yield
            else:
                r.agent.require(r.core)
                r.agent.touch(r.core)
                if self._open is not None:
                    self._open.resident.add(region)
                yield
        finally:
            self._filling.remove(region)
