"""torch's CUDA allocator, replaced for the process: every allocation is a region's.

What it is not: needed for ``with mux.region(...)``, which puts one block's allocations in a region and leaves the
rest to torch.
"""

from __future__ import annotations

import ctypes
import warnings
from typing import Any

import torch

from pymux import _core, config
from pymux.errors import ConfigError, RegionError
from pymux.mux import Mux, connect
from pymux.region import Region

_HOOKS = {
    "set_record_stream_fn": "pymux_torch_record_stream",
    "set_begin_allocate_to_pool": "pymux_torch_begin_pool",
    "set_end_allocate_to_pool_fn": "pymux_torch_end_pool",
    "set_release_pool": "pymux_torch_release_pool",
    "set_base_alloc_fn": "pymux_torch_base",
    "set_reset_fn": "pymux_torch_empty_cache",
}
_installed: dict[int, Region] = {}  # by torch's ordinal
_allocator: Any = None  # torch keeps a pointer to it


def install(region: str = "default", *, mux: Mux | None = None) -> Region:
    """Replace torch's CUDA allocator with one that allocates in a region; call it before torch uses the device.

    Freed blocks are used again in the order of their stream; ``Tensor.record_stream`` and CUDA graphs' private pools
    work as with torch's own allocator, and so do ``torch.cuda.empty_cache()`` and the figures of
    ``torch.cuda.memory_stats()``. ``with mux.region(name)`` still decides for a block. Frees go by address, from
    any thread, in a phase or not.

    An allocation outside a phase takes a lease, which lasts until the next phase begins, or `Mux.evict`: a process
    that never opens a phase keeps the device.

    Args:
        region: name of the region; created if new.
        mux: whose; default: a new connection, of the job ``PYMUX_JOB`` or else of the script's name.

    Returns:
        The region; its ``mux`` is the connection.

    Raises:
        RegionError: torch has used the device already, or ``expandable_segments`` is on.
        BrokerLost, DriverError: as `connect`.
    """
    global _allocator  # noqa: PLW0603 - there is one allocator in a process
    settings = config.load()
    if settings.expandable_segments:
        raise RegionError(
            "torch's expandable_segments is on, which its own allocator alone knows. Remove it from "
            "PYTORCH_CUDA_ALLOC_CONF."
        )
    mux = mux or connect(settings.job)
    target = mux.region(region)
    _core.torch_install(target.agent, target.core)
    integration = mux._torch_integration()  # noqa: SLF001 - two halves of one thing
    if integration.device.type == "cpu":
        warnings.warn(
            "this torch has no CUDA, so that there is no allocator to replace: tensors get into a region by "
            "'with mux.region(...)' or adopt().",
            stacklevel=2,
        )
        return target
    if _allocator is None:
        allocator = torch.cuda.memory.CUDAPluggableAllocator(_core.__file__, "pymux_torch_allocate", "pymux_torch_free")
        hooks, library = allocator.allocator(), ctypes.CDLL(_core.__file__)
        for hook, function in _HOOKS.items():
            if not hasattr(hooks, hook):
                raise ConfigError(f"torch {torch.__version__} has no {hook}; install() needs torch 2.5 or newer.")
            getattr(hooks, hook)(ctypes.cast(getattr(library, function), ctypes.c_void_p).value)
        try:
            torch.cuda.memory.change_current_allocator(allocator)
        except RuntimeError as e:
            raise RegionError(
                f"{e}. install() replaces torch's allocator, and has to come before the first tensor on the device."
            ) from e
        _allocator = allocator
        torch.cuda.memory.memory_stats_as_nested_dict = _stats_for_torch
        for module in (torch.cuda, torch.cuda.memory):
            module.reset_peak_memory_stats = _reset_peaks
    _installed[integration.device.index] = target
    integration.replaced = True
    return target


def memory_stats(region: Region) -> dict[str, int]:
    """Return what the replaced allocator has done in a region.

    Returns:
        ``allocated_bytes`` and ``peak_allocated_bytes`` as they were asked for; ``cached_bytes`` that a stream may use
        again, ``pending_bytes`` that several streams have used and one is not done with; ``reserved_bytes`` of the
        region, on the device or not; ``allocations`` and how many ``hits`` of them came from the cache.
    """
    stats = _core.torch_stats(region.core)
    s = region.mux.stats()["regions"][region.name]
    stats["reserved_bytes"] = s["resident_bytes"] + s["evicted_bytes"]
    return stats


def _index(device: Any) -> int:
    found: int = torch.cuda._utils._get_device_index(device, optional=True)  # noqa: SLF001 - as torch's own do
    return found


def _stats_for_torch(device: Any = None) -> dict[str, Any]:
    """What torch.cuda.memory_stats() flattens, as far as a replaced allocator knows it."""
    region = _installed.get(_index(device))
    if region is None:
        return {}
    s = memory_stats(region)
    peak = s["peak_allocated_bytes"]

    def of(current: int, most: int) -> dict[str, dict[str, int]]:
        return {"all": {"current": current, "peak": most, "allocated": current, "freed": 0}}

    return {
        "allocated_bytes": of(s["allocated_bytes"], peak),
        "requested_bytes": of(s["allocated_bytes"], peak),
        "active_bytes": of(s["allocated_bytes"] + s["pending_bytes"], peak),
        "reserved_bytes": of(s["reserved_bytes"], max(s["reserved_bytes"], peak)),
        "num_alloc_retries": 0,
        "num_ooms": 0,
    }


def _reset_peaks(device: Any = None) -> None:
    region = _installed.get(_index(device))
    if region is not None:
        _core.torch_reset_peak(region.core)
