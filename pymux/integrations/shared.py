"""Torch tensors of a region that several processes map: told by one, made again by the others."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import torch

from pymux.errors import RegionError
from pymux.integrations import nest
from pymux.region import Region


def describe(region: Region, what: Any) -> str:
    """Describe tensors by their places in a region.

    Args:
        region: where they are.
        what: a module (its parameters and buffers by name), or a mapping of names to tensors.

    Raises:
        RegionError: a tensor is elsewhere.
        TypeError: `what` is something else.
    """
    if isinstance(what, torch.nn.Module):
        what = {**dict(what.named_parameters()), **dict(what.named_buffers())}
    if not isinstance(what, Mapping) or not all(isinstance(t, torch.Tensor) for t in what.values()):
        raise TypeError(f"share() takes a module or a mapping of names to tensors, not a {type(what).__name__}.")
    out = []
    for name, t in what.items():
        if (reason := nest.unusable(t)) or t.is_conj() or t.is_neg():
            reason = (
                reason or "a view that torch conjugates or negates when it is read; share resolve_conj().resolve_neg()"
            )
            raise TypeError(f"tensor {name!r} cannot be shared: it is {reason}.")
        if t.numel() and not region.contains(t.data_ptr()):
            raise RegionError(
                f"tensor {name!r} is not in region {region.name!r}: create it in 'with mux.region(...)', or move it "
                f"with mux.adopt(..., region={region.name!r})."
            )
        offset = t.data_ptr() - region.base if t.numel() else 0
        out.append([name, str(t.dtype).removeprefix("torch."), offset, list(t.shape), list(t.stride())])
    return json.dumps(out)


def rebuild(region: Region, text: str, device: torch.device) -> dict[str, torch.Tensor]:
    """Make the tensors that `describe` told of, over this process's addresses of the region."""
    out = {}
    for name, kind, offset, shape, stride in json.loads(text or "[]"):
        dtype = getattr(torch, kind)
        empty = torch.empty(0, dtype=dtype, device=device)
        if 0 in shape:
            out[name] = empty.reshape(shape)
            continue
        span = 1 + sum((n - 1) * s for n, s in zip(shape, stride, strict=True))
        view = region.agent.view(region.core, offset, span * dtype.itemsize)
        raw = torch.frombuffer(view, dtype=torch.uint8) if device.type == "cpu" else _on_device(view, device)
        out[name] = empty.set_(raw.untyped_storage(), 0, shape, stride)
    return out


class _Array:
    """A view of device memory as CUDA's array interface has it."""

    def __init__(self, view: Any) -> None:
        self.view = view  # keeps the addresses
        self.__cuda_array_interface__ = {
            "shape": (view.size,),
            "typestr": "|u1",
            "data": (view.ptr, False),
            "version": 3,
        }


def _on_device(view: Any, device: torch.device) -> torch.Tensor:
    return torch.as_tensor(_Array(view), device=device)
