"""
pymux's extension: regions, pager and agent. Use the pymux package, not this module.
"""
from __future__ import annotations
import collections.abc
import typing
import typing_extensions
__all__: list[str] = ['Agent', 'Block', 'Device', 'PhaseRequest', 'Region', 'RegionView', 'StreamBlock', 'SwapSpan', 'checkpoint_lock', 'checkpoint_restore', 'checkpoint_save', 'checkpoint_state', 'checkpoint_unlock', 'device_count', 'driver_version', 'load_driver', 'measure_link', 'served', 'torch_empty_cache', 'torch_enter', 'torch_install', 'torch_last_error', 'torch_leave', 'torch_reset_peak', 'torch_stats', 'wire_layout']
class Device:
    """
    Facts about a device. Holds its primary context while alive.
    """
    def __init__(self, ordinal: typing.SupportsInt | typing.SupportsIndex) -> None:
        ...
    def probe_export(self) -> None:
        """
        Create, export, import and free one allocation; raises what the driver says.
        """
    @property
    def can_export(self) -> bool:
        ...
    @property
    def granularity(self) -> int:
        ...
    @property
    def host_addressable(self) -> bool:
        ...
    @property
    def name(self) -> str:
        ...
    @property
    def total_bytes(self) -> int:
        ...
    @property
    def uuid(self) -> bytes:
        ...
class Block:
    """
    A live block of a region's memory.
    """
    def __buffer__(self, flags: int) -> memoryview:
        ...
    @property
    def ptr(self) -> int:
        ...
    @property
    def size(self) -> int:
        ...
class Region:
    """
    A named range of device addresses whose pages come and go.
    """
    def contains(self, ptr: typing.SupportsInt | typing.SupportsIndex) -> bool:
        ...
    def published(self) -> tuple[int, bytes]:
        """
        Of a shared region: the latest generation, and what publish() said of it.
        """
    @property
    def base(self) -> int:
        ...
    @property
    def fingerprint(self) -> bool:
        ...
    @property
    def generation(self) -> int:
        ...
    @property
    def live_bytes(self) -> int:
        ...
    @property
    def name(self) -> str:
        ...
    @property
    def on_evict(self) -> str:
        ...
    @property
    def read_only(self) -> bool:
        ...
    @property
    def shared(self) -> bool:
        ...
    @property
    def size(self) -> int:
        ...
class RegionView:
    """
    A range of a region's addresses.
    """
    @property
    def ptr(self) -> int:
        ...
    @property
    def size(self) -> int:
        ...
class SwapSpan:
    """
    One page's swap; times are CLOCK_MONOTONIC seconds, bytes those copied.
    """
    @property
    def background(self) -> bool:
        ...
    @property
    def begin(self) -> float:
        ...
    @property
    def bytes(self) -> int:
        ...
    @property
    def end(self) -> float:
        ...
    @property
    def out(self) -> bool:
        ...
class PhaseRequest:
    """
    What a phase needs; made once, used for each time it is entered.
    """
    def __init__(self, *, name: str, uses: collections.abc.Sequence[Region], lazy: collections.abc.Sequence[Region], writes: collections.abc.Sequence[Region], regions: str, expected: typing.SupportsFloat | typing.SupportsIndex, priority: typing.SupportsInt | typing.SupportsIndex, overlap: bool, ranks: typing.SupportsInt | typing.SupportsIndex) -> None:
        """
        expected: seconds.
        """
class Agent:
    """
    This process's connection to the broker, and its pages.
    """
    def __init__(self, *, socket: str, spawn: collections.abc.Sequence[str], job: str, client: str, group: str, rank: typing.SupportsInt | typing.SupportsIndex, world: typing.SupportsInt | typing.SupportsIndex, joint: bool, device: typing.SupportsInt | typing.SupportsIndex, controller: bool, page_size: typing.SupportsInt | typing.SupportsIndex, need: typing.SupportsInt | typing.SupportsIndex, host_need: typing.SupportsInt | typing.SupportsIndex, pass_pages: bool, snapshot: bool, duplex: bool, poison: bool, connect_timeout: typing.SupportsFloat | typing.SupportsIndex) -> None:
        ...
    def acquire(self, request: PhaseRequest, opener: typing.SupportsInt | typing.SupportsIndex = 0, ran: typing.SupportsFloat | typing.SupportsIndex = 0.0, timeout: typing.SupportsFloat | typing.SupportsIndex = -1.0) -> None:
        """
        Block until the lease is active with every page that the request uses resident. opener: which thread or task asks; ran: seconds of the phase that are done; timeout: seconds, < 0 waits for ever.
        """
    def allocate(self, region: Region, bytes: typing.SupportsInt | typing.SupportsIndex) -> Block:
        ...
    def close(self) -> None:
        ...
    def create_region(self, name: str, keep: bool, fingerprint: bool, frozen: bool, claim: bool = False) -> Region:
        ...
    def done_with(self, region: Region) -> None:
        """
        Wait for the device, then let the region's pages be written back and given away within the phase.
        """
    def enter(self, request: PhaseRequest, opener: typing.SupportsInt | typing.SupportsIndex = 0, ran: typing.SupportsFloat | typing.SupportsIndex = 0.0) -> bool:
        """
        As acquire, without waiting: whether the phase is entered. Else entered() says when it is.
        """
    def entered(self) -> bool:
        """
        Whether the phase of enter() is entered by now; raises why it cannot be.
        """
    def evict(self, region: Region | None) -> int:
        """
        Swap a region out (None: all) and give its pages to the bank; bytes given.
        """
    def leave(self, end: bool = True, back: typing.SupportsFloat | typing.SupportsIndex = 0.0) -> None:
        """
        Wait for this process's device work, then park or return the lease. end=False: the phase goes on later, in `back` seconds if that is known.
        """
    def open_shared(self, id: str, name: str, writable: bool) -> Region:
        ...
    def pin(self, region: Region, reason: str) -> None:
        """
        The region's pages stay on the device, for this reason; empty: no longer.
        """
    def pressed(self) -> bool:
        """
        Whether the phase should give way at its next yield point.
        """
    def publish(self, region: Region, meta: str, stream: typing.SupportsInt | typing.SupportsIndex) -> None:
        """
        A new generation of a shared region, complete once the stream's work is done.
        """
    def read(self, region: Region, ptr: typing.SupportsInt | typing.SupportsIndex, to: typing_extensions.Buffer) -> None:
        """
        Copy a region's contents from wherever they are into a contiguous writable buffer.
        """
    def require(self, region: Region) -> None:
        """
        Wait, in a phase, until a region is resident.
        """
    def set_live(self, region: Region, ranges: collections.abc.Sequence[tuple[typing.SupportsInt | typing.SupportsIndex, typing.SupportsInt | typing.SupportsIndex]] | None) -> None:
        """
        Only these (offset, bytes) of the region, and later allocations, must survive an eviction; None: all.
        """
    def share(self, region: Region) -> str:
        """
        Let other processes map the region's pages; returns what open_shared() takes.
        """
    def spans(self) -> list[SwapSpan]:
        ...
    def stats(self) -> dict[str, typing.Any]:
        ...
    def tell_wait(self, opener: typing.SupportsInt | typing.SupportsIndex, behind: typing.SupportsInt | typing.SupportsIndex) -> None:
        """
        A thread or task waits for another's phase to end (0: not any more); raises DeadlockError if that is for ever.
        """
    def touch(self, region: Region) -> None:
        """
        The open phase writes the region.
        """
    def trim_host(self) -> int:
        ...
    def view(self, region: Region, offset: typing.SupportsInt | typing.SupportsIndex, bytes: typing.SupportsInt | typing.SupportsIndex) -> RegionView:
        """
        Addresses of a region, resident or not.
        """
    def wait_published(self, region: Region, stream: typing.SupportsInt | typing.SupportsIndex) -> None:
        """
        What is submitted to the stream next comes after the work of the latest publish().
        """
    def watch(self) -> int:
        """
        Descriptor of an eventfd that is readable when entered() may have changed.
        """
    def withdraw(self) -> None:
        """
        Give up the phase of enter(), entered or not.
        """
    @property
    def active(self) -> bool:
        ...
    @property
    def host_addressable(self) -> bool:
        ...
    @property
    def page_size(self) -> int:
        ...
    @property
    def recalled(self) -> bool:
        ...
    @property
    def remote_uses(self) -> list[str] | None:
        """
        Names of the regions that a phase opened by another member of the group uses, or None.
        """
    @property
    def uuid(self) -> bytes:
        ...
class StreamBlock:
    """
    A block of a region, used again in the order of a stream once dropped.
    """
    def __init__(self, agent: Agent, region: Region, bytes: typing.SupportsInt | typing.SupportsIndex, stream: typing.SupportsInt | typing.SupportsIndex) -> None:
        ...
    @property
    def ptr(self) -> int:
        ...
def checkpoint_lock(pid: typing.SupportsInt | typing.SupportsIndex, timeout_ms: typing.SupportsInt | typing.SupportsIndex) -> None:
    """
    A process's CUDA calls wait from now on; timeout_ms=0 waits as long as it takes.
    """
def checkpoint_restore(pid: typing.SupportsInt | typing.SupportsIndex) -> None:
    ...
def checkpoint_save(pid: typing.SupportsInt | typing.SupportsIndex) -> None:
    """
    A locked process's device memory goes to the host.
    """
def checkpoint_state(pid: typing.SupportsInt | typing.SupportsIndex) -> str:
    ...
def checkpoint_unlock(pid: typing.SupportsInt | typing.SupportsIndex) -> None:
    ...
def device_count() -> int:
    """
    How many devices the loaded driver has.
    """
def driver_version() -> int:
    """
    The loaded driver's CUDA version, as 1000 * major + 10 * minor.
    """
def load_driver(choice: str = '') -> str:
    """
    Load the CUDA driver table once per process; returns the library's path.
    """
def measure_link(ordinal: typing.SupportsInt | typing.SupportsIndex) -> tuple[float, float, float, bool]:
    """
    Copy rates to the host, to the device and both at once, in bytes per second, and whether both at once gain.
    """
def served(device: typing.SupportsInt | typing.SupportsIndex) -> tuple[Agent, Region]:
    """
    In a process that 'pymux run' started: its connection, and the region that cudaMalloc allocates in.
    """
def torch_empty_cache() -> None:
    """
    Wait for the device and give up what freed blocks are cached.
    """
def torch_enter(agent: Agent, region: Region) -> None:
    """
    This thread's torch allocations come from the region until torch_leave().
    """
def torch_install(agent: Agent, region: Region) -> None:
    """
    Torch's allocations on the agent's device come from the region, outside of torch_enter().
    """
def torch_last_error() -> str:
    ...
def torch_leave() -> None:
    ...
def torch_reset_peak(region: Region) -> None:
    ...
def torch_stats(region: Region) -> dict[str, int]:
    """
    Of the allocations that torch_install() serves from the region.
    """
def wire_layout() -> list[tuple[str, int, int]]:
    """
    (name, type, bytes) of every message, to compare with pymux.wire.
    """
