"""A region: a named part of the device's memory whose pages come and go."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterable, Iterator
from operator import index
from types import TracebackType
from typing import TYPE_CHECKING, Any

from pymux import _core, config
from pymux.errors import ConfigError, RegionError
from pymux.turns import opener

if TYPE_CHECKING:
    from pymux.mux import Mux

SHARED_PREFIX = "pymux-region:"  # of what share() returns, before the segment's id


class Region:
    """A named part of the device's memory whose pages come and go, at fixed addresses.

    As a context manager: torch's allocations in the block come from the region, under a lease.
    """

    def __init__(self, mux: Mux, core: _core.Region, at: int, *, frozen: bool) -> None:
        self.mux = mux
        self.core = core
        self.at = at  # index of its device in mux.ordinals
        self.agent = mux._agents[at]  # noqa: SLF001 - two halves of one thing
        self.frozen = frozen
        self.timeout: float | None = None  # seconds that its blocks wait for the device
        self._entered: dict[int, list[contextlib.ExitStack]] = {}  # by thread or task

    @property
    def name(self) -> str:
        """Name of the region."""
        return self.core.name

    @property
    def device(self) -> int:
        """Ordinal of its CUDA device."""
        return self.mux.ordinals[self.at]

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
        return bool(self.core.contains(ptr))

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
        try:
            pairs = None if ranges is None else [(index(offset), index(size)) for offset, size in ranges]
        except (TypeError, ValueError):
            raise RegionError(
                f"set_live({config.clip(ranges)}): give (offset, bytes) pairs of integers, or None for everything."
            ) from None
        for offset, size in pairs or ():
            if offset < 0 or size < 0 or offset + size > self.core.size:
                raise RegionError(
                    f"set_live(): offset {offset} with {size} bytes is not in region {self.name!r}. Offsets count from "
                    f"region.base."
                )
        self.agent.set_live(self.core, pairs)

    def pin(self, reason: str) -> None:
        """Keep the region's pages where they are, because something else knows their physical memory.

        NCCL does when it registers buffers; `pymux.integrations` pins for that by itself. Other jobs have that much
        less of the device until `unpin`.

        Args:
            reason: for the errors that say so.

        Raises:
            ConfigError: `reason` is no text.
        """
        if not isinstance(reason, str):
            raise ConfigError(f"pin(reason={config.clip(reason)}): give a text.")
        self.agent.pin(self.core, reason or "it is pinned")

    def unpin(self) -> None:
        """Let the region's pages go again."""
        self.agent.pin(self.core, "")

    def allocate(self, nbytes: int) -> _core.Block:
        """Allocate a block for raw use, inside a phase; it is freed when the object is dropped.

        Args:
            nbytes: at least 1; the block is 256-byte aligned.

        Returns:
            Its address and size, and a buffer where the host can address the device.

        Raises:
            ConfigError: `nbytes` is no positive integer.
            DeviceOutOfMemory: the device has no room.
            LeaseError: no phase is open.
        """
        return self.agent.allocate(self.core, config.check_int("nbytes", nbytes, 1, config.MAX_BYTES))

    def capture_graph(self, graph: Any, **options: Any) -> contextlib.AbstractContextManager[None]:
        """Capture a CUDA graph whose private memory is in the region: ``with region.capture_graph(graph):`` in a phase.

        It replays in phases that use the region, also after the memory has been out and back. Not inside a
        ``with mux.region(...)`` block of the same region: torch does not begin a pool twice.

        Args:
            graph: a ``torch.cuda.CUDAGraph``.
            **options: of ``torch.cuda.graph``, but for its pool.

        Raises:
            DriverError: this torch has no CUDA.
        """
        manager: contextlib.AbstractContextManager[None] = self.mux._torch_integration().capturing(  # noqa: SLF001
            self, graph, **options
        )
        return manager

    def read(self, ptr: int, to: Any) -> None:
        """Copy contents at a device address into a buffer, without a lease.

        Args:
            ptr: of the first byte, in the region.
            to: a writable, contiguous buffer; as many bytes as it has are read.

        Raises:
            ContentsLost: the pages were discarded.
            RegionError: not all of the bytes are the region's.
            TypeError: `to` is no such buffer.
        """
        config.check_int("ptr", ptr, 0, 2**64 - 1)
        try:
            with memoryview(to) as view:
                size, usable = view.nbytes, view.c_contiguous and not view.readonly
        except TypeError:
            usable = False
        if not usable:
            raise TypeError(f"read(to={config.clip(to, 30)}): give a writable, contiguous buffer, such as a bytearray.")
        if size and not (self.base <= ptr and ptr + size <= self.base + self.core.size):
            raise RegionError(f"read(): {size} bytes at {ptr:#x} are not all in region {self.name!r}.")
        self.agent.read(self.core, ptr, to)

    # ---- sharing with other processes ----------------------------------------------------------

    def share(self, what: Any = None) -> str:
        """Let other processes of this node map the region's memory, without a copy.

        Its pages stay on the device once, whoever uses them, and move out once, when nobody does. Takes a lease
        where no phase is open. What is allocated in the region later is shared too.

        Args:
            what: a module, or a mapping of names to tensors, that are in the region: others get them as
                `SharedRegion.tensors`. None: others get addresses.

        Returns:
            A token for `Mux.open_shared`, good as long as a process has the region open; plain text, for a queue or
            an environment variable.

        Raises:
            DriverError: the driver cannot export memory.
            RegionError: its contents need not survive, or are tracked by fingerprints; or a tensor is elsewhere.
        """
        with self.mux._lease_for(self.name, "share"):  # noqa: SLF001
            segment = self.agent.share(self.core)
            if what is not None or self.generation == 0:
                self.publish(what)
        return f"{SHARED_PREFIX}{segment}"

    def publish(self, what: Any = None, *, stream: int | None = None) -> int:
        """Say, in the phase that wrote a shared region, that it has a new generation of contents.

        Args:
            what: as of `share`; None: the tensors are where they were.
            stream: the ``CUstream`` that has the work, as an integer; default torch's current one.

        Returns:
            The generation, from 1.

        Raises:
            LeaseError: no phase is open.
            RegionError: the region is not shared, or open here to be read.
        """
        if not self.core.shared:
            raise RegionError(f"region {self.name!r} is not shared: region.share() does that.")
        if self.core.read_only:
            raise RegionError(f"region {self.name!r} was opened to be read: see open_shared(token, writable=True).")
        if what is not None:
            meta = self.mux._torch_integration().describe(self, what)  # noqa: SLF001
        else:
            meta = self.core.published()[1].decode()
        self.agent.publish(self.core, meta, self._stream(stream))
        return self.generation

    @property
    def generation(self) -> int:
        """How many times a shared region was published; 0 for others."""
        return self.core.generation

    def _stream(self, stream: int | None) -> int:
        if stream is not None:
            return config.check_int("stream", stream, 0, 2**64 - 1)
        if "torch" not in sys.modules:
            return 0
        return int(self.mux._torch_integration().current_stream(self))  # noqa: SLF001

    @contextlib.contextmanager
    def serving_torch_allocator(self) -> Iterator[None]:
        """Serve this thread's calls of the extension's pluggable torch allocator from the region."""
        _core.torch_enter(self.agent, self.core)
        try:
            yield
        finally:
            _core.torch_leave()

    def __enter__(self) -> Region:
        with contextlib.ExitStack() as stack:
            stack.enter_context(self.mux._lease_for(self.name, "region"))  # noqa: SLF001
            if "torch" in sys.modules:
                stack.enter_context(self.mux._torch_integration().allocating(self))  # noqa: SLF001
            self._entered.setdefault(opener()[0], []).append(stack.pop_all())
        return self

    def __exit__(self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None) -> None:
        if self.mux.forked:
            return
        who = opener()[0]
        if who not in self._entered:  # it was entered by another thread
            who = next(reversed(self._entered))
        block = self._entered[who].pop()
        if not self._entered[who]:
            del self._entered[who]
        block.__exit__(kind, exc, tb)

    def __repr__(self) -> str:
        s = self.mux.stats()["regions"][self.name]
        return (
            f"<Region {self.name!r}, on_evict={self.on_evict!r}: {s['live_bytes'] / 2**20:.1f} MiB allocated, "
            f"{s['resident_bytes'] / 2**20:.0f} MiB resident, {s['evicted_bytes'] / 2**20:.0f} MiB evicted>"
        )
