"""torch_memory_saver's interface, over regions and leases.

``install()`` puts this module under the name ``torch_memory_saver``, so that SGLang, slime, verl and NeMo RL use it
unchanged. What differs from that project: memory that is paused is given to other jobs; a process has the device,
by a lease, from its first region until it has paused all its tags, and again from its next ``resume()``; contents
come back page by page, as fast as the link; nothing is preloaded.

What it is not: needed by code that opens phases. A process does one or the other.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Iterator
from typing import Any, Literal

import torch

from pymux import config
from pymux.errors import PymuxError
from pymux.mux import Mux, connect
from pymux.region import Region

HookMode = Literal["preload", "torch"]
CpuBackupBackend = Literal["mmap", "pinned"]
_PHASE = "torch_memory_saver"


def install(mux: Mux | None = None) -> TorchMemorySaver:
    """Make ``import torch_memory_saver`` mean this module; call it before anything imports that name.

    In a process that multiprocessing spawns, call it there too, such as at the top of the main module.

    Args:
        mux: the connection to use; default: one is made at the first region, of the job ``PYMUX_JOB`` or else of the
            script's name.

    Returns:
        What ``torch_memory_saver.torch_memory_saver`` will be.

    Raises:
        PymuxError: that name was imported already, and is another module.
    """
    other = sys.modules.get("torch_memory_saver")
    if other is not None and other is not sys.modules[__name__]:
        raise PymuxError(
            f"torch_memory_saver was imported already, from {getattr(other, '__file__', '?')}. Call install() first."
        )
    sys.modules["torch_memory_saver"] = sys.modules[__name__]
    if mux is not None:
        torch_memory_saver._mux = mux  # noqa: SLF001 - of this module
    torch_memory_saver._start_as_the_environment_says()  # noqa: SLF001
    return torch_memory_saver


class TorchMemorySaver:
    """Regions by tag, paused and resumed. One for the process: ``torch_memory_saver``.

    Attributes:
        hook_mode: ``"preload"`` or ``"torch"``: accepted, and of no effect.
        memory_margin_bytes: accepted, and of no effect: the broker's budget leaves memory to others.
        retain_cpu_backup: accepted, and of no effect: copies stay as long as the host budget allows.
    """

    def __init__(self) -> None:
        self.hook_mode: HookMode = "preload"
        self.memory_margin_bytes = 0
        self.retain_cpu_backup = os.environ.get("TMS_RETAIN_CPU_BACKUP") == "1"
        self._mux: Mux | None = None
        self._tags: dict[str, set[str]] = {}  # names of their regions
        self._paused: set[str] = set()  # names of regions
        self._phase: Any = None  # while anything is not paused
        self._mutex = threading.RLock()
        self._local = threading.local()
        self._for_life: Any = None  # the region of TMS_INIT_ENABLE

    # ---- allocating ------------------------------------------------------------------------------

    @contextlib.contextmanager
    def region(
        self,
        tag: str = "default",
        enable_cpu_backup: bool = False,
        enable_disk_backup: bool = False,
        cpu_backup_backend: CpuBackupBackend | None = None,
    ) -> Iterator[None]:
        """Allocate this thread's tensors so that they can be paused.

        Args:
            tag: what `pause` and `resume` go by.
            enable_cpu_backup: contents survive a pause, in pinned host memory; else they are undefined afterwards.
            enable_disk_backup: the same; what the host has no room for is in the broker's ``--spill-dir``.
            cpu_backup_backend: accepted, and of no effect.

        Raises:
            ValueError: both kinds of backup are asked for, or a kind of host memory without a backup.
            DeviceOutOfMemory: the tag was paused, and there is no room for it.
        """
        if enable_cpu_backup and enable_disk_backup:
            raise ValueError("enable_cpu_backup and enable_disk_backup exclude each other.")
        if cpu_backup_backend is not None and not enable_cpu_backup:
            raise ValueError("cpu_backup_backend needs enable_cpu_backup=True.")
        region = self._make(tag, keep=enable_cpu_backup or enable_disk_backup)
        with self._allocating(region):
            yield

    @contextlib.contextmanager
    def cuda_graph(
        self,
        cuda_graph: Any,
        pool: Any = None,  # noqa: ARG002 - all graphs of a tag share its region's pool
        stream: Any = None,
        capture_error_mode: str = "global",
        tag: str = "default",
        enable_cpu_backup: bool = False,
        cpu_backup_backend: CpuBackupBackend | None = None,
    ) -> Iterator[None]:
        """Capture a graph as ``torch.cuda.graph`` does, with its private memory in a region.

        Addresses stay, so that the graph can be replayed after a pause and a resume; with `enable_cpu_backup` also
        what it expects to find there. The arguments are those of `region` and of ``torch.cuda.graph``.

        Raises:
            DriverError: this torch has no CUDA.
        """
        if cpu_backup_backend is not None and not enable_cpu_backup:
            raise ValueError("cpu_backup_backend needs enable_cpu_backup=True.")
        region = self._make(tag, keep=enable_cpu_backup)
        integration = region.mux._torch_integration()  # noqa: SLF001 - as Region does
        with integration.capturing(region, cuda_graph, stream=stream, capture_error_mode=capture_error_mode):
            yield

    @contextlib.contextmanager
    def disable(self) -> Iterator[None]:
        """Allocate outside of any region, in the regions that this thread is in."""
        suspended = self._allocations()
        for _, context in reversed(suspended):
            context.__exit__(None, None, None)
        self._local.allocating = []
        try:
            yield
        finally:
            for region, _ in suspended:
                self._begin(region)

    # ---- pausing ---------------------------------------------------------------------------------

    def pause(self, tag: str | None = None) -> None:
        """Give a tag's memory (None: everybody's) away; addresses stay. What is paused already stays so.

        Raises:
            HostOutOfMemory: there is no room for the backup; what could not move is still on the device.
            LeaseError: a phase of the Mux is open that is not of this interface.
        """
        with self._mutex:
            names = self._names(tag) - self._paused
            if not names or self._mux is None:
                return
            self._leave()
            try:
                for name in sorted(names):
                    self._mux.evict(name)
                    self._paused.add(name)
            finally:
                self._enter()

    def resume(self, tag: str | None = None) -> None:
        """Bring a tag's memory (None: everybody's) back; waits until this process has the device.

        Raises:
            DeviceOutOfMemory: there is no room.
        """
        with self._mutex:
            names = self._names(tag) & self._paused
            if not names:
                return
            self._leave()
            self._paused -= names
            try:
                self._enter()
            except BaseException:
                self._paused |= names
                raise

    def get_cpu_backup(self, x: torch.Tensor, zero_copy: bool = False) -> torch.Tensor:  # noqa: ARG002
        """Read a tensor's contents, paused or not.

        Args:
            x: a tensor of a region with a backup, of any shape and dtype.
            zero_copy: accepted; the result is a copy.

        Returns:
            A CPU tensor of the same shape and dtype.

        Raises:
            ContentsLost: it was paused without a backup.
            ValueError: it is not in a region.
        """
        if self._mux is None or self._mux.region_of(x.data_ptr()) is None:
            raise ValueError("get_cpu_backup() takes a tensor that was allocated in a region.")
        result: torch.Tensor = self._mux.to_host(x)
        return result

    def set_disk_backup_dir(self, path: str) -> None:
        """Accepted: where contents go that the host has no room for is the broker's ``--spill-dir``."""

    # ---- inside ----------------------------------------------------------------------------------

    def _make(self, tag: str, *, keep: bool) -> Region:
        with self._mutex:
            if self._mux is None:
                self._mux = connect(config.load().job, name=f"{_PHASE}.{os.getpid()}")
            name = f"{tag}, kept" if keep else tag
            region = self._mux.region(name, on_evict="keep" if keep else "discard")
            new = name not in self._tags.setdefault(tag, set())
            self._tags[tag].add(name)
            if new or name in self._paused or self._phase is None:
                self._leave()
                self._paused.discard(name)
                self._enter()
            return region

    @contextlib.contextmanager
    def _allocating(self, region: Region) -> Iterator[None]:
        self._begin(region)
        try:
            yield
        finally:
            _, context = self._allocations().pop()
            context.__exit__(None, None, None)

    def _begin(self, region: Region) -> None:
        context = region.mux._torch_integration().allocating(region)  # noqa: SLF001 - as Region does
        context.__enter__()
        self._allocations().append((region, context))

    def _allocations(self) -> list[tuple[Region, Any]]:
        """The regions that this thread is in, and torch's contexts for them."""
        if not hasattr(self._local, "allocating"):
            self._local.allocating = []
        found: list[tuple[Region, Any]] = self._local.allocating
        return found

    def _names(self, tag: str | None) -> set[str]:
        if tag is None:
            return set().union(*self._tags.values())
        return set(self._tags.get(tag, ()))

    def _enter(self) -> None:
        """Have the device, with all that is not paused."""
        names = self._names(None) - self._paused
        if names and self._phase is None and self._mux is not None:
            phase = self._mux.phase(_PHASE, uses=sorted(names))
            phase.__enter__()
            self._phase = phase

    def _leave(self) -> None:
        phase, self._phase = self._phase, None
        if phase is not None:
            phase.__exit__(None, None, None)

    def _start_as_the_environment_says(self) -> None:
        if os.environ.get("TMS_INIT_ENABLE") == "1" and self._for_life is None:
            keep = os.environ.get("TMS_INIT_ENABLE_CPU_BACKUP") == "1"
            self._for_life = self.region(enable_cpu_backup=keep)
            self._for_life.__enter__()


torch_memory_saver = TorchMemorySaver()


@contextlib.contextmanager
def configure_subprocess() -> Iterator[None]:
    """Start processes inside of this that use the interface: nothing has to be preloaded for them."""
    yield
