"""The tensors in what people hand over: modules, state dicts, any nest of dicts, lists and tuples."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

_PLAIN = (str, bytes, bool, int, float, complex, torch.dtype, torch.device, torch.Size)


def tensors_of(what: Any) -> list[torch.Tensor]:
    """Return the tensors in `what`, each once.

    Numbers, texts and, in mappings, None are passed over, as state dicts have them.

    Raises:
        TypeError: there are none, or something is in it that a region cannot hold; says what and where.
    """
    found: dict[int, torch.Tensor] = {}
    for at, t in _walk(what, "", set()):
        if reason := unusable(t):
            raise TypeError(f"adopt() found {reason}{at and f' at {at}'}.")
        found[id(t)] = t
    if not found:
        raise TypeError(
            f"adopt() takes tensors, modules, optimizers, and dicts, lists and tuples of them; there is no tensor in "
            f"this {type(what).__name__}."
        )
    return list(found.values())


def _walk(x: Any, at: str, seen: set[int]) -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(x, torch.Tensor):
        yield at, x
    elif isinstance(x, torch.nn.Module):
        for name, t in (*x.named_parameters(), *x.named_buffers()):
            yield f"{at}.{name}".lstrip("."), t
    elif isinstance(x, _PLAIN) or id(x) in seen:
        return
    elif isinstance(x, Mapping):
        seen.add(id(x))
        for key, value in x.items():
            if value is not None:
                yield from _walk(value, f"{at}[{key!r}]"[:80], seen)
    elif isinstance(x, Iterable):
        seen.add(id(x))
        for i, value in enumerate(x):
            yield from _walk(value, f"{at}[{i}]"[:80], seen)
    else:
        where = f" at {at}" if at else ""
        raise TypeError(
            f"adopt() found {'None' if x is None else f'a {type(x).__name__}'}{where}; it takes tensors, modules, "
            f"optimizers, and dicts, lists and tuples of them."
        )


def unusable(t: torch.Tensor) -> str | None:
    """Say what a tensor is when it is none whose memory is one strided range; else None."""
    if torch.nn.parameter.is_lazy(t):
        return "a lazy module's parameter without a shape; run a batch through the module first"
    if t.is_nested:
        return "a nested tensor, which has several parts; adopt its values() and offsets()"
    if t.layout != torch.strided:
        kind = str(t.layout).removeprefix("torch.")
        return f"a tensor of layout {kind}, which has several parts; adopt its indices and values, or t.to_dense()"
    if t.is_quantized:
        return "a quantized tensor, whose scales torch keeps elsewhere; adopt t.int_repr() and keep the scales"
    if t.device.type == "meta":
        return "a tensor on the meta device, which has no memory; give it some with module.to_empty(device=...)"
    if is_traceable_wrapper_subclass(t):
        return f"a {type(t).__name__}, which wraps other tensors; adopt those, such as t.to_local() of a DTensor"
    return None
