"""What a user calls: connect(), and the Mux that makes regions and phases.

What it is not: it moves no pages (the extension does) and knows no framework (integrations do).
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import os
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from math import inf
from typing import Any, Literal

from pymux import _core, calibrate, config, run
from pymux.errors import AcquireTimeout, ClientExists, ConfigError, FrozenRegion, LeaseError, RegionError, UnknownRegion
from pymux.phase import Entry, Phase, PhaseOptions
from pymux.region import Region
from pymux.shared import SharedRegion, segment_of
from pymux.turns import Turns, opener

OnEvict = Literal["keep", "discard"]
Swap = Literal["demand", "snapshot"]
Track = Literal["phases", "fingerprint"]

_TRACE_LENGTH = 65536  # spans that a Mux remembers
_MAX_ENTRIES = 256
_RUN: set[int] = set()  # devices whose connection of 'pymux run' has its Mux
_CONNECTED: dict[tuple[str, str, str], Mux] = {}  # by socket, job and name: of this process
_MAX_ORDINAL = 1023  # of a device; more than any machine has
_MAX_WORLD = 1 << 16
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
    timeout: float | None = None,
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
        timeout: seconds that phases, ``with mux.region(...)`` blocks and `Mux.adopt` wait for the device where they do
            not say; None: as long as it takes.
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
        ClientExists: this job has a process of this name already; when that is this one, `current` returns the
            connection.
        LeaseError: the process is a fork of one that uses the device.
        VersionMismatch: the broker is of another version.
    """
    _check_arguments(job, name, group, device, devices, rank, world, controller, swap)
    config.check_seconds("connect_timeout", connect_timeout)
    if timeout is not None:
        config.check_seconds("timeout", timeout)
    if group is not None:
        name = f"{group}.controller" if controller and name == "main" else name if name != "main" else f"{group}.{rank}"
        config.check_name("name", name)
    need = config.check_size("device_memory", device_memory)
    host_need = config.check_size("host_memory", host_memory)
    settings = config.load()
    driver = _core.load_driver(settings.driver)
    key = (str(settings.socket), job, name)
    plain = name == "main" and group is None and devices is None and swap == "demand"
    plain = plain and not device_memory and not host_memory
    if settings.run and plain and job == settings.job and (mux := _join_run(job, device, check=settings.check)):
        return mux
    if key in _CONNECTED:
        raise ClientExists(
            f"this process is connected as {config.clip(name)} of job {config.clip(job)} already. "
            f"pymux.current({config.clip(job)}) returns that connection; its close() ends it."
        )
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
                    need=need,
                    host_need=host_need,
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
    mux = Mux(
        agents,
        job=job,
        name=name,
        ordinals=ordinals,
        joint=bool(devices or group),
        check=settings.check,
        timeout=timeout,
    )
    _CONNECTED[key] = mux
    return mux


def current(job: str | None = None, name: str | None = None) -> Mux:
    """Return a connection that this process has, such as after a notebook's cell has lost the variable.

    Args:
        job: of which job; None: of any.
        name: of which name within the job; None: of any.

    Raises:
        LeaseError: there is none, or several fit.
    """
    fits = [m for m in _CONNECTED.values() if job in {None, m.job} and name in {None, m.name}]
    if len(fits) == 1:
        return fits[0]
    known = config.clip([f"{m.job}/{m.name}" for m in _CONNECTED.values()], 120)
    if fits:
        raise LeaseError(f"this process has {len(fits)} connections that fit: {known}. Say job= and name=.")
    raise LeaseError(
        f"this process has no such connection; it has {known}. pymux.connect(job) makes one."
        if _CONNECTED
        else "this process is not connected: pymux.connect(job) does that."
    )


def _check_arguments(
    job: str,
    name: str,
    group: str | None,
    device: int,
    devices: Sequence[int] | None,
    rank: int,
    world: int,
    controller: bool,
    swap: str,
) -> None:
    for what, value in (("job", job), ("name", name), ("group", name if group is None else group)):
        config.check_name(what, value)
    config.check_choice("swap", swap, ("demand", "snapshot"))
    config.check_int("device", device, 0, _MAX_ORDINAL)
    config.check_int("world", world, 1, _MAX_WORLD)
    if devices is not None:
        if isinstance(devices, str) or not isinstance(devices, Sequence):
            raise ConfigError(f"devices={config.clip(devices)}: give a list of ordinals, such as [0, 1].")
        for ordinal in devices:
            config.check_int("devices", ordinal, 0, _MAX_ORDINAL)
        if group is not None or not devices or len(set(devices)) < len(devices):
            raise ConfigError(
                f"devices={config.clip(list(devices))}: give different ordinals, and no group= beside them."
            )
    if not isinstance(controller, bool):
        raise ConfigError(f"controller={config.clip(controller)}: give True or False.")
    if controller and group is None:
        raise ConfigError("controller=True: say of which group=.")
    if config.check_int("rank", rank, 0, _MAX_WORLD) >= world or (devices and world > 1):
        raise ConfigError(f"rank={rank}, world={world}: ranks count from 0 to world - 1, and need a group=.")
    if group is None and world > 1:
        raise ConfigError(f"world={world}: say of which group=.")


def _join_run(job: str, device: int, *, check: bool) -> Mux | None:
    """The connection that 'pymux run' has made, or would make, for cudaMalloc; once for each device."""
    if device in _RUN:
        return None
    _RUN.add(device)
    agent, core = _core.served(device)
    mux = Mux([agent], job=job, name=f"run.{os.getpid()}", ordinals=[device], check=check)
    mux._add(Region(mux, core, 0, frozen=False))  # noqa: SLF001 - two halves of one thing
    return mux


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
        timeout: float | None = None,
    ) -> None:
        self.job = job
        self.name = name
        self.ordinals = list(ordinals)
        self._agents = list(agents)
        self._agent = self._agents[0]
        self._joint = joint
        self._timeout = timeout
        self._regions: dict[str, Region] = {}
        self._spans: deque[tuple[str, str, float, float]] = deque(maxlen=_TRACE_LENGTH)
        self._torch: Any = None
        self._turns = Turns(self._agent.tell_wait)
        self._open: Phase | None = None
        self._guests = threading.Lock()  # guards _open, and how many guests its phase has
        self._no_guests = threading.Condition(self._guests)
        self._helper: Any = None  # the thread of what would block an event loop
        self.forked = False
        self._epoch = 0
        self._entries: dict[PhaseOptions, Entry] = {}  # of phases that were entered with the regions of now
        self._filling: list[str] = []  # regions whose blocks (or adopt() calls) are open
        self._check: Any = None
        _HERE.add(self)
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
        timeout: float | None = None,
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
            timeout: seconds that ``with`` blocks of the region and `adopt` wait for the device, from now on; None:
                as before, at first what `connect` was told.

        Raises:
            ConfigError: an argument is not usable.
            RegionError: it exists with other options.
        """
        config.check_name("region", name)
        config.check_choice("on_evict", on_evict, ("keep", "discard"))
        config.check_choice("track", track, ("phases", "fingerprint"))
        if frozen is not None and not isinstance(frozen, bool):
            raise ConfigError(f"frozen={config.clip(frozen)}: give True or False.")
        if timeout is not None:
            config.check_seconds("timeout", timeout)
        region = self._regions.get(name)
        at = self._at(device)
        if region is None:
            core = self._agents[at].create_region(name, on_evict != "discard", track == "fingerprint", bool(frozen))
            region = Region(self, core, at, frozen=bool(frozen))
            self._add(region)
        for option, asked in (("on_evict", on_evict), ("frozen", frozen), ("track", track), ("device", device)):
            if asked is not None and getattr(region, option) != asked:
                raise RegionError(f"region {name!r} exists with {option}={getattr(region, option)!r}, not {asked!r}.")
        if timeout is not None:
            region.timeout = timeout
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
        if name is not None:
            config.check_name("name", name)
        at = self._at(device)
        core = self._agents[at].open_shared(segment_of(token), name or "", bool(writable))
        region = SharedRegion(self, core, at, frozen=not writable)
        self._add(region)
        return region

    def _at(self, device: int | None) -> int:
        """Index of a device's agent; of the first without one."""
        if device is None:
            return 0
        if isinstance(device, bool) or device not in self.ordinals:
            raise RegionError(f"device={config.clip(device)}: this process uses {self.ordinals}.")
        return self.ordinals.index(device)

    def _add(self, region: Region) -> None:
        self._regions[region.name] = region
        self._entries.clear()
        self._epoch += 1

    @property
    def regions(self) -> dict[str, Region]:
        """The regions by name."""
        return dict(self._regions)

    def adopt(self, what: Any, region: str = "weights", *, timeout: float | None = None) -> Any:
        """Move existing tensors into a region, keeping the Python objects.

        Args:
            what: a tensor, a torch module (parameters and buffers), an optimizer (its state, also
                what its first ``step()`` creates), a state dict, or any nest of dicts, lists and tuples of these.
            region: name of the region; created if new.
            timeout: as of `region`.

        Returns:
            `what` itself.

        Raises:
            AcquireTimeout: the device was not had within `timeout`.
            DeviceOutOfMemory: the device has no room.
            TypeError: `what` has no tensors, or some that a region cannot hold.
        """
        self._torch_integration().adopt(self.region(region, timeout=timeout), what)
        return what

    def to_host(self, tensor: Any) -> Any:
        """Read a region's tensor from wherever its contents are, without a lease.

        Args:
            tensor: a torch tensor of any shape and dtype; outside regions it is copied as usual.

        Returns:
            A new CPU tensor of the same shape and dtype.

        Raises:
            ContentsLost: its pages were discarded.
            TypeError: it is no tensor, or a sparse, nested or quantized one of a region.
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
            TypeError: `what` has no ``state_dict()``.
        """
        if not callable(getattr(what, "state_dict", None)):
            raise TypeError(
                f"state_dict() takes a module or an optimizer; a {type(what).__name__} has no state_dict()."
            )
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
        waits for the device work of the phase. Phases do not nest; those of several threads, and of several tasks
        (``async with``), take turns in the order of asking.

        Args:
            name: such as ``"rollout"`` or ``"train"``.
            uses: names of the regions that must be resident, in any process of the group; default all.
            writes: those whose contents may change; default all that are used and not frozen. A region not
                written moves out without a copy when the host has its contents already.
            lazy: regions (of `uses`, or beside them) that come in behind the body, in the order named;
                `Lease.require` waits for one.
            expect: expected seconds, for the scheduler; 0: as earlier phases of this name took.
            timeout: seconds to wait for the device; None: what `connect` was told; ``math.inf``: as long as it takes.
            priority: as CUDA counts: smaller is more urgent, 0 usual. The body's torch work runs on a stream of
                this priority (0 for those above), and the broker's policy ``priority`` goes by it.
            overlap: whether the phase may run beside a more urgent one when both fit, instead of waiting for it.
            devices: ordinals of the devices that it needs, of a Mux with several; default all.

        Raises:
            ConfigError: an argument is not usable. Entering it raises:
            AcquireTimeout: the device was not had within `timeout`.
            DeadlockError: it would be waited for for ever.
            LeaseError: this thread or task has a phase open.
            UnknownRegion: it names a region that is not there.
        """
        config.check_name("phase", name)
        config.check_int("priority", priority, -(2**31), 2**31 - 1)
        config.check_seconds("expect", expect)
        if timeout is None:
            timeout = self._timeout
        elif config.check_seconds("timeout", timeout) == inf:
            timeout = None
        on = self.ordinals
        if devices is not None:
            on = list(devices) if isinstance(devices, Iterable) and not isinstance(devices, str) else []
            if not on or any(isinstance(d, bool) or d not in self.ordinals for d in on):
                raise ConfigError(f"devices={config.clip(devices)}: this process uses {self.ordinals}.")
        return Phase(
            self,
            PhaseOptions(
                name=name,
                uses=None if uses is None else config.check_names("uses", uses),
                writes=None if writes is None else config.check_names("writes", writes),
                lazy=config.check_names("lazy", lazy),
                expect=float(expect),
                timeout=timeout,
                priority=priority,
                overlap=bool(overlap),
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
        if self.forked:
            return  # the parent's
        atexit.unregister(self.close)
        for key in [k for k, m in _CONNECTED.items() if m is self]:
            del _CONNECTED[key]
        if self._check is not None:
            check, self._check = self._check, None
            check.__exit__(None, None, None)
        for agent in self._agents:
            agent.close()
        if self._helper is not None:
            self._helper.shutdown(wait=False)

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
        missing = [n for n in names if not isinstance(n, str) or n not in self._regions]
        if missing:
            known = config.clip(list(self._regions), 100).strip("[]") or "none"
            raise UnknownRegion(
                f"no region {config.clip(missing[0])} in job {config.clip(self.job)}; it has {known}. Create it with "
                f"mux.region(...) first."
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
        frozen = [n for n in written if n in self._regions and self._regions[n].frozen and n != o.fills]
        if frozen and o.writes is not None and self._regions[frozen[0]].core.read_only:
            raise FrozenRegion(
                f"phase {o.name!r} names region {frozen[0]!r} in writes=, and it was opened to be read: "
                f"open_shared(token, writable=True) opens it to be written."
            )
        if frozen and o.writes is not None:
            raise FrozenRegion(
                f"phase {o.name!r} names region {frozen[0]!r} in writes=, and the region is frozen. Leave it out, or "
                f"create the region without frozen=True."
            )
        agent = self._agents[on[0]]

        def mine(names: Iterable[str]) -> list[_core.Region]:
            found = [self._regions[n] for n in names if n in self._regions]
            return [r.core for r in found if r.agent is agent]

        request = _core.PhaseRequest(
            name=o.name,
            uses=mine(eager),
            lazy=mine(o.lazy),
            writes=mine(n for n in written if n not in frozen),
            regions=o.for_members() if self._joint else "",
            expected=o.expect,
            priority=o.priority,
            overlap=o.overlap,
            ranks=0 if len(on) == len(self._agents) else sum(1 << i for i in on),
        )
        eager_here = frozenset(eager) & self._regions.keys()
        return Entry(epoch=self._epoch, opener=agent, request=request, eager=eager_here)

    def _entry(self, o: PhaseOptions) -> Entry:
        entry = self._entries.get(o)
        if entry is None:
            if len(self._entries) >= _MAX_ENTRIES:  # of a loop that says something new each time
                self._entries.clear()
            entry = self._entries[o] = self._prepare(o)
        return entry

    def _enter(self, p: Phase, *, resumes: bool = False, detached: bool = False) -> None:
        """Wait for the turn and for the lease.

        Args:
            p: the phase.
            resumes: it goes on after a break.
            detached: no thread or task is inside of it, and any may end it.
        """
        who, thread = (0, 0) if detached else opener()
        o = p.options
        begin = time.monotonic()
        left = o.timeout
        if not self._turns.take_free(who, thread, o.name):
            left = self._turns.take(who, thread, o.name, left)
        agent: _core.Agent | None = None
        try:
            entry = p.entry
            if resumes or entry is None or entry.epoch != self._epoch:
                entry = self._entry_of(p, resumes=resumes)
            p.opener = agent = entry.opener
            p.resident, p.done = set(entry.eager), set()
            agent.acquire(entry.request, who, p.ran, -1.0 if left is None else left)
        except BaseException:
            self._not_entered(agent)
            raise
        p.entered = time.monotonic()  # between acquire() and the body every line counts: caches are cold
        p.open = True
        self._open = p
        self._spans.append(("wait", o.name, begin, p.entered))
        if o.priority:
            p.stream = self._torch_stream(o.priority)
            p.stream.__enter__()

    async def _enter_async(self, p: Phase, *, resumes: bool = False) -> None:
        """As `_enter`, without blocking the event loop; torch's stream stays as it is, for other tasks use it too."""
        who, thread = opener()
        begin = time.monotonic()
        left = await self._turns.take_async(who, thread, p.name, p.options.timeout)
        agent: _core.Agent | None = None
        try:
            entry = self._entry_of(p, resumes=resumes)
            p.opener = agent = entry.opener
            p.resident, p.done = set(entry.eager), set()
            if not agent.enter(entry.request, who, p.ran):
                await self._entered(agent, p, left)
        except BaseException:
            self._not_entered(agent)
            raise
        p.entered = time.monotonic()
        p.open = True
        self._open = p
        self._spans.append(("wait", p.name, begin, p.entered))

    async def _entered(self, agent: _core.Agent, p: Phase, left: float | None) -> None:
        """Wait until the agent has the lease, where it says so."""
        import asyncio  # noqa: PLC0415 - a program that awaits this has it

        loop = asyncio.get_running_loop()
        descriptor, changed = agent.watch(), asyncio.Event()

        def wake() -> None:
            with contextlib.suppress(BlockingIOError):
                os.read(descriptor, 8)
            changed.set()

        deadline = None if left is None else time.monotonic() + left
        loop.add_reader(descriptor, wake)
        try:
            while not agent.entered():
                rest = None if deadline is None else max(0.0, deadline - time.monotonic())
                try:
                    await asyncio.wait_for(changed.wait(), rest)
                except asyncio.TimeoutError:
                    raise AcquireTimeout(
                        f"phase {p.name!r} did not get the device within {p.options.timeout:g} s. 'pymux status' "
                        f"shows who holds it."
                    ) from None
                changed.clear()
        finally:
            loop.remove_reader(descriptor)

    def _entry_of(self, p: Phase, *, resumes: bool) -> Entry:
        if not resumes:
            p.ran = 0.0
        entry = p.entry
        if entry is None or entry.epoch != self._epoch:
            entry = p.entry = self._entry(p.options)
        return entry

    def _not_entered(self, agent: _core.Agent | None) -> None:
        """Nothing of what a phase has waited for is kept, not even if it came in the same moment."""
        if self.forked:
            return
        try:
            if agent is not None:
                agent.withdraw()
        finally:
            self._turns.give()

    def _leave(self, p: Phase, *, end: bool = True, back: float = 0.0) -> None:
        if p.stream is None and self._torch is None:
            self._give_back(p, end=end, back=back)
            return
        try:
            if p.stream is not None:
                stream, p.stream = p.stream, None
                stream.__exit__(None, None, None)
            if self._torch is not None:
                self._torch.before_leave()
        finally:
            self._give_back(p, end=end, back=back)

    async def _leave_async(self, p: Phase, *, end: bool = True, back: float = 0.0) -> None:
        """As `_leave`, whatever happens to the task meanwhile."""
        try:
            if self._torch is not None:
                self._torch.before_leave()
        finally:
            await self._beside(lambda: self._give_back(p, end=end, back=back))

    def _give_back(self, p: Phase, *, end: bool, back: float) -> None:
        ended = time.monotonic()
        with self._guests:
            self._open = None
            while p.guests:  # what others fill in this phase needs it
                self._no_guests.wait()
        p.open = False
        try:
            p.opener.leave(end, back)
        finally:
            p.ran = 0.0 if end else p.ran + ended - p.entered
            self._spans.append(("phase", p.options.name, p.entered, ended))
            self._turns.give()

    async def _beside(self, work: Callable[[], None]) -> None:
        """Do what waits for the device on a thread beside the event loop's; to its end, also when cancelled."""
        import asyncio  # noqa: PLC0415 - a program that awaits this has it
        from concurrent.futures import ThreadPoolExecutor  # noqa: PLC0415 - the same

        if self._helper is None:
            self._helper = ThreadPoolExecutor(1, thread_name_prefix="pymux")
        done = asyncio.get_running_loop().run_in_executor(self._helper, work)
        cancelled: asyncio.CancelledError | None = None
        while not done.done():
            try:
                await asyncio.wait([done])
            except asyncio.CancelledError as e:  # noqa: PERF203 - what was begun goes on to its end
                cancelled = e
        done.result()
        if cancelled is not None:
            raise cancelled

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
        """Be inside a phase that may write `region`: the open one, or one of our own.

        The phase may be another thread's, such as of the loop that this one helps: it does not end before the block.
        """
        r = self._regions[region]
        self._filling.append(region)
        try:
            with self._guests:
                p = self._open
                guest = p is not None and not self._turns.is_of(*opener())
                if p is not None and guest:
                    p.guests += 1
            if p is None and r.agent.remote_uses is None:
                with self._own_phase(r, what):
                    yield
                return
            try:
                r.agent.require(r.core)
                r.agent.touch(r.core)
                if p is not None:
                    p.resident.add(region)
                yield
            finally:
                if p is not None and guest:
                    with self._guests:
                        p.guests -= 1
                        self._no_guests.notify_all()
        finally:
            self._filling.remove(region)

    def _own_phase(self, region: Region, what: str) -> Phase:
        phase = self.phase(
            f"{what} {region.name}".encode()[: config.MAX_NAME].decode(errors="ignore"),
            uses=(region.name,),
            timeout=region.timeout,
            devices=(self.ordinals[region.at],),
        )
        return Phase(self, replace(phase.options, fills=region.name))

    def _after_fork(self) -> None:
        """In a forked child: nothing of this is its own, and no lock that another thread had is ever free again."""
        self.forked = True
        self._turns = Turns(_refuse)
        self._guests = threading.Lock()
        self._no_guests = threading.Condition(self._guests)


def _refuse(*_: object) -> None:
    raise LeaseError("this process is a fork of the one that connected.")


_HERE: weakref.WeakSet[Mux] = weakref.WeakSet()  # of this process, for the children that it forks


def _in_child() -> None:
    for mux in list(_HERE):
        mux._after_fork()  # noqa: SLF001 - its own class


os.register_at_fork(after_in_child=_in_child)
