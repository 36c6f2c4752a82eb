"""What torch would do to a region's memory behind its back: refused, in words.

What it is not: the check of ``PYMUX_CHECK=1``, but for what its modes do not see.

A process's torch has these in place from its first Mux that uses torch; outside regions they change nothing.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any

import torch

from pymux.errors import RegionError, RegionNotResident
from pymux.mux import Mux
from pymux.region import Region

_MUXES: weakref.WeakSet[Mux] = weakref.WeakSet()
_CHECKED: weakref.WeakSet[Mux] = weakref.WeakSet()


def guard(mux: Mux) -> None:
    """Keep torch from moving the storage of a Mux's regions to other memory, for other processes."""
    if not _MUXES:
        for name in ("_share_fd_cpu_", "_share_filename_cpu_", "_share_cuda_"):
            if hasattr(torch.UntypedStorage, name):
                _put_before(torch.UntypedStorage, name, _refuse_sharing)
    _MUXES.add(mux)


def check(mux: Mux) -> None:
    """In check mode: pickling reads a storage where no torch function is called."""
    if not _CHECKED:
        _put_before(torch.Tensor, "__reduce_ex__", _refuse_absent)
        _put_before(torch.UntypedStorage, "__reduce__", _refuse_absent)
        _put_before(torch.UntypedStorage, "_write_file", _refuse_absent)
        for name in ("cpu", "clone", "tolist", "__getitem__", "__iter__"):
            _put_before(torch.UntypedStorage, name, _refuse_absent)
        _put_before(torch._C.PyTorchFileWriter, "write_record", _refuse_absent)  # noqa: SLF001 - torch.save's own
    _CHECKED.add(mux)


def _put_before(owner: Any, name: str, look: Callable[[Any, str], None]) -> None:
    original = getattr(owner, name)

    @functools.wraps(original)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        for x in (self, *args):
            if isinstance(x, (torch.Tensor, torch.UntypedStorage)):
                look(x, name)
        return original(self, *args, **kwargs)

    setattr(owner, name, call)


def _region_of(x: Any, muxes: weakref.WeakSet[Mux]) -> Region | None:
    try:
        address = x.data_ptr()
    except RuntimeError:  # of a tensor without storage
        return None
    return next((r for m in muxes if (r := m.region_of(address)) is not None), None) if address else None


def _refuse_sharing(x: Any, _: str) -> None:
    if (region := _region_of(x, _MUXES)) is not None:
        raise RegionError(
            f"a tensor of region {region.name!r} cannot go through a queue or share_memory_(): torch would move it to "
            f"other memory. region.share(tensors) gives a token; mux.open_shared(token) maps them in the other process."
        )


def _refuse_absent(x: Any, name: str) -> None:
    region = _region_of(x, _CHECKED)
    if region is not None and (reason := region.mux.why_absent(region.name)):
        raise RegionNotResident(f"{name} touches region {region.name!r} {reason}")
