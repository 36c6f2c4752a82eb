"""torch: tensors, modules and optimizers in regions.

On a GPU a region is a ``torch.cuda.MemPool`` over the extension's pluggable allocator. Where host
code addresses the device's memory directly and torch has no such device, tensors are CPU tensors
whose storage lies in the region: a function mode moves what torch's factory functions return.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from pymux import _core, config
from pymux.errors import DriverError, FrozenRegion, RegionError, RegionNotResident
from pymux.integrations import shared
from pymux.mux import Mux
from pymux.region import Region

_FACTORIES = frozenset(
    {
        "arange", "as_tensor", "asarray", "bfloat16", "clone", "complex", "contiguous", "cpu", "double",
        "empty", "empty_like", "empty_permuted", "empty_strided", "eye", "float", "from_numpy", "full",
        "full_like", "half", "linspace", "logspace", "new_empty", "new_empty_strided", "new_full", "new_ones",
        "new_tensor", "new_zeros", "ones", "ones_like", "rand", "rand_like", "randint", "randint_like", "randn",
        "randn_like", "randperm", "scalar_tensor", "tensor", "to", "zeros", "zeros_like",
    }
)  # fmt: skip


# torch frees the segments of a dead pool with its own allocator, not the pool's (pytorch issue 146431), and
# tensors may outlive a Mux: pools and their allocators live as long as the process.
_FOR_LIFE: list[tuple[Any, Any]] = []


class Integration:
    """torch for one Mux.

    Attributes:
        device: the torch device of its tensors.
        replaced: whether pymux has replaced torch's allocator; then regions need no memory pools.

    Raises:
        DriverError: torch cannot use the Mux's device.
    """

    def __init__(self, mux: Mux) -> None:
        self._mux = mux
        self._pools: dict[str, Any] = {}
        self._allocator: Any = None
        self.replaced = False
        self._stepping: contextlib.ExitStack | None = None
        ordinal = _cuda_ordinal(mux.uuid)
        if ordinal is not None:
            self.device = torch.device("cuda", ordinal)
        elif mux.host_addressable:
            self.device = torch.device("cpu")
        else:
            raise DriverError(
                f"this torch ({torch.__version__}) does not see the device {mux.ordinals[0]}. Install a CUDA build of "
                f"torch, check CUDA_VISIBLE_DEVICES, or set PYMUX_DRIVER=sim to try without a GPU."
            )

    @contextlib.contextmanager
    def allocating(self, region: Region) -> Iterator[None]:
        """Put this thread's torch allocations into a region; needs a lease.

        On the CPU form these are what factory functions return; on a GPU all.
        """
        if self.device.type == "cpu":
            with _RegionMode(region):
                yield
            return
        if self.replaced:
            with region.serving_torch_allocator():
                yield
            return
        if reason := _registered_by_nccl("TORCH_NCCL_USE_TENSOR_REGISTER_ALLOCATOR_HOOK", "0"):
            region.pin(reason)
        pool = self._pool_of(region)
        device = self._device_of(region)
        with region.serving_torch_allocator(), torch.cuda.use_mem_pool(pool, device=device):
            try:
                # Settings may have changed since: ask torch itself.
                if not region.contains(torch.empty(1, dtype=torch.uint8, device=device).data_ptr()):
                    raise RegionError(
                        f"torch does not allocate in region {region.name!r}: expandable_segments was turned on, or "
                        f"another allocator was installed. Turn it off before using regions."
                    )
                yield
            except torch.OutOfMemoryError as e:
                e.args = (f"{e} pymux: {_core.torch_last_error()}",)
                raise

    def _pool_of(self, region: Region) -> Any:
        if config.load().expandable_segments:
            raise RegionError(
                "torch's expandable_segments is on, and then torch maps memory itself instead of asking the region. "
                "Remove it from PYTORCH_CUDA_ALLOC_CONF."
            )
        if self._allocator is None:
            self._allocator = torch.cuda.memory.CUDAPluggableAllocator(
                _core.__file__, "pymux_torch_malloc", "pymux_torch_free"
            )
        pool = self._pools.get(region.name)
        if pool is None:
            pool = self._pools[region.name] = torch.cuda.MemPool(self._allocator.allocator())
            _FOR_LIFE.append((self._allocator, pool))
        return pool

    @contextlib.contextmanager
    def capturing(self, region: Region, graph: Any, **options: Any) -> Iterator[None]:
        """Capture a CUDA graph whose private memory is in a region; in a phase.

        Not inside `allocating` of the same region: torch does not begin a pool twice.

        Args:
            region: where the graph's memory is.
            graph: a ``torch.cuda.CUDAGraph``.
            **options: of ``torch.cuda.graph``, but for its pool.

        Raises:
            DriverError: this torch has no CUDA.
        """
        if self.device.type == "cpu":
            raise DriverError("CUDA graphs need a CUDA build of torch and a GPU.")
        if reason := _registered_by_nccl("NCCL_GRAPH_REGISTER", "1"):
            region.pin(reason)
        pool = None if self.replaced else self._pool_of(region).id
        with region.serving_torch_allocator(), torch.cuda.graph(graph, pool=pool, **options):
            yield

    def adopt(self, region: Region, what: Any) -> None:
        """See Mux.adopt."""
        if isinstance(what, torch.optim.Optimizer):
            self._adopt_optimizer(region, what)
            return
        if isinstance(what, torch.nn.Module):
            tensors: list[Any] = [*what.parameters(), *what.buffers()]
        elif isinstance(what, torch.Tensor):
            tensors = [what]
        else:
            tensors = list(what)
        wrong = [t for t in tensors if not isinstance(t, torch.Tensor)]
        if wrong or not tensors:
            raise TypeError(f"adopt() takes tensors, a module or an optimizer, not {type(wrong[0] if wrong else what)}")
        elsewhere = [t for t in tensors if t.device.type != self.device.type]
        if elsewhere:
            raise TypeError(f"adopt() found a tensor on {elsewhere[0].device}; move it to {self.device} first")
        self._move(region, tensors)

    def to_host(self, mux: Mux, tensor: torch.Tensor) -> torch.Tensor:
        """See Mux.to_host."""
        if tensor.numel() == 0:
            return torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
        region = mux.region_of(tensor.data_ptr())
        if region is None:
            return tensor.detach().to("cpu", copy=True)
        # The whole span of the view, read as bytes, seen through the tensor's own strides.
        with torch.utils._python_dispatch._disable_current_modes():  # noqa: SLF001 - no public form
            span = 1 + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
            raw = torch.empty(span, dtype=tensor.dtype, device="cpu")
            region.read(tensor.data_ptr(), raw.view(torch.uint8).numpy())
            return raw.as_strided(tensor.shape, tensor.stride()).clone()

    def state_dict(self, mux: Mux, what: Any) -> Any:
        """See Mux.state_dict."""
        return tree_map(lambda x: self.to_host(mux, x) if isinstance(x, torch.Tensor) else x, what.state_dict())

    def describe(self, region: Region, what: Any) -> str:
        """Tensors of a shared region, as other processes are told."""
        return shared.describe(region, what)

    def rebuild(self, region: Region, text: str) -> dict[str, torch.Tensor]:
        """Tensors of a region that another process has described."""
        return shared.rebuild(region, text, self._device_of(region))

    def current_stream(self, region: Region) -> int:
        """The handle of torch's current stream on a region's device; 0 for tensors on the host."""
        if self.device.type == "cpu":
            return 0
        return int(torch.cuda.current_stream(self._device_of(region)).cuda_stream)

    @contextlib.contextmanager
    def stream(self, priority: int) -> Iterator[None]:
        """Make a stream of this CUDA priority torch's current one, after the work submitted so far.

        torch has none of less than the default priority, 0. Tensors on the host have no streams.
        """
        if self.device.type == "cpu":
            yield
            return
        stream = torch.cuda.Stream(self.device, priority=min(priority, 0))
        stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(stream):
            yield

    def before_leave(self) -> None:
        """Close what a failed optimizer step left open; give cached free blocks back to the driver."""
        self._end_step()
        if self.device.type == "cuda" and self._mux.recalled:
            torch.cuda.empty_cache()

    def outside_bytes(self) -> int:
        """Bytes that torch holds on the device outside regions; they are not moved."""
        if self.device.type == "cpu" or self.replaced:
            return 0
        inside = sum(r["live_bytes"] for r in self._mux.stats()["regions"].values())
        reserved: int = torch.cuda.memory_reserved(self.device)
        return max(0, reserved - int(inside))

    # ---- moving tensors ------------------------------------------------------------------------

    def _move(self, region: Region, tensors: Iterable[torch.Tensor]) -> None:
        """Give tensors storage in the region; those that share storage go on sharing it."""
        moved: dict[int, torch.UntypedStorage] = {}
        with region.mux._lease_for(region.name, "adopt"), torch.no_grad():  # noqa: SLF001
            for t in tensors:
                old = t.untyped_storage()
                if old.nbytes() == 0 or region.contains(old.data_ptr()):
                    continue
                new = moved.get(old.data_ptr())
                if new is None:
                    new = moved[old.data_ptr()] = self._new_storage(region, old.nbytes())
                    _bytes_of(new).copy_(_bytes_of(old))
                t.data = _view(t, new)

    def _new_storage(self, region: Region, nbytes: int) -> torch.UntypedStorage:
        if self.device.type == "cpu":
            return _cpu_storage(region, nbytes)
        with self.allocating(region):
            return torch.empty(nbytes, dtype=torch.uint8, device=self._device_of(region)).untyped_storage()

    def _device_of(self, region: Region) -> torch.device:
        """The torch device of a region, of a Mux that may have several."""
        if self.device.type == "cpu":
            return self.device
        return torch.device("cuda", _cuda_ordinal(region.agent.uuid))

    def _adopt_optimizer(self, region: Region, optimizer: torch.optim.Optimizer) -> None:
        def state() -> list[torch.Tensor]:
            return [
                t
                for entry in optimizer.state.values()
                for t in tree_leaves(entry)
                if isinstance(t, torch.Tensor) and t.device.type == self.device.type
            ]

        def before(*_: Any) -> None:
            self._end_step()
            params = [p for g in optimizer.param_groups for p in g["params"] if p.grad is not None]
            if all(optimizer.state.get(p) for p in params):
                return
            stack = contextlib.ExitStack()  # this step creates state: in the region
            stack.enter_context(region.mux._lease_for(region.name, "optimizer"))  # noqa: SLF001
            stack.enter_context(self.allocating(region))
            self._stepping = stack

        def after(*_: Any) -> None:
            self._end_step()
            strays = [t for t in state() if not region.contains(t.untyped_storage().data_ptr())]
            if strays:  # such as after load_state_dict()
                self._move(region, strays)

        if tensors := state():
            self._move(region, tensors)
        optimizer.register_step_pre_hook(before)
        optimizer.register_step_post_hook(after)

    def _end_step(self) -> None:
        stack, self._stepping = self._stepping, None
        if stack is not None:
            stack.close()


class _RegionMode(TorchFunctionMode):
    """Moves what factory functions return into a region."""

    def __init__(self, region: Region) -> None:
        super().__init__()
        self._region = region

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if getattr(func, "__name__", "") not in _FACTORIES or "out" in kwargs:
            return result
        if type(result) is not torch.Tensor or result.device.type != "cpu" or result.layout != torch.strided:
            return result
        old = result.untyped_storage()
        if old.nbytes() == 0 or self._region.mux.region_of(old.data_ptr()) is not None:
            return result
        shared = {t.untyped_storage().data_ptr() for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)}
        if old.data_ptr() in shared:
            return result  # a view, or a conversion with nothing to do
        new = _cpu_storage(self._region, old.nbytes())
        _bytes_of(new).copy_(_bytes_of(old))
        result.data = _view(result, new)
        return result


class _CheckMode(TorchFunctionMode):
    """Raises before an operation touches a region's tensor whose pages may be away, or writes a frozen one."""

    _HARMLESS = frozenset(
        {"data_ptr", "untyped_storage", "__get__", "__set__", "size", "stride", "dim", "numel", "detach", "view_as",
         "requires_grad_", "is_contiguous", "element_size", "storage_offset", "type", "set_", "__hash__"}
    )  # fmt: skip

    def __init__(self, mux: Mux) -> None:
        super().__init__()
        self._mux = mux
        self._writes = _FrozenMode(mux)

    def __enter__(self) -> Any:
        self._writes.__enter__()
        return super().__enter__()

    def __exit__(self, *exc: object) -> None:
        super().__exit__(*exc)
        self._writes.__exit__(*exc)

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", str(func))
        if name not in self._HARMLESS:
            for t in tree_leaves((args, kwargs)):
                region = _region_of(self._mux, t)
                if region is not None and (reason := self._mux.why_absent(region.name)):
                    raise RegionNotResident(f"torch.{name} touches region {region.name!r} {reason}")
        return func(*args, **kwargs)


class _FrozenMode(TorchDispatchMode):
    """Raises before an operation, autograd's and an optimizer's too, writes a frozen region."""

    def __init__(self, mux: Mux) -> None:
        super().__init__()
        self._mux = mux

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        for i, argument in enumerate(func._schema.arguments):  # noqa: SLF001 - no public form
            if argument.alias_info is None or not argument.alias_info.is_write:
                continue
            for t in tree_leaves(args[i] if i < len(args) else kwargs.get(argument.name)):
                region = _region_of(self._mux, t)
                if region is not None and region.frozen and not self._mux.filling(region.name):
                    raise FrozenRegion(
                        f"{func} writes region {region.name!r}, which is frozen: what changes in it is not saved. "
                        f"Write it in 'with mux.region({region.name!r})', or create it without frozen=True."
                    )
        return func(*args, **kwargs)


def _registered_by_nccl(setting: str, default: str) -> str | None:
    """Why NCCL registers what is allocated or captured now, or None.

    Registered memory is known to the group's other members by its physical pages, which an eviction would change.
    NCCL registers VMM memory through cuMem handles alone, so not with NCCL_CUMEM_ENABLE=0.
    """
    value = os.environ.get(setting, default)
    if value.lower() in {"0", "false", ""} or os.environ.get("NCCL_CUMEM_ENABLE") == "0":
        return None
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return None
    if "nccl" not in torch.distributed.get_backend() or torch.distributed.get_world_size() == 1:
        return None
    return (
        f"NCCL registers its memory ({setting}={value}), and the other ranks know it by its physical pages. Set "
        f"{setting}=0 before the process group is made, and it can move."
    )


def _region_of(mux: Mux, t: Any) -> Region | None:
    if not isinstance(t, torch.Tensor) or t.layout != torch.strided or t.numel() == 0:
        return None
    return mux.region_of(t.data_ptr())


def check_mode(mux: Mux) -> TorchFunctionMode:
    """Return the mode of ``PYMUX_CHECK=1`` for this thread."""
    return _CheckMode(mux)


def _bytes_of(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _view(like: torch.Tensor, storage: torch.UntypedStorage) -> torch.Tensor:
    empty = torch.empty(0, dtype=like.dtype, device=storage.device)
    return empty.set_(storage, like.storage_offset(), like.shape, like.stride())


def _cpu_storage(region: Region, nbytes: int) -> torch.UntypedStorage:
    # The storage holds the block, and so frees it.
    return torch.frombuffer(region.allocate(nbytes), dtype=torch.uint8).untyped_storage()


def _cuda_ordinal(uuid: bytes) -> int | None:
    """Torch's ordinal of the device with this UUID, which CUDA_VISIBLE_DEVICES may have renumbered."""
    if not torch.cuda.is_available():
        return None
    for i in range(torch.cuda.device_count()):
        if str(torch.cuda.get_device_properties(i).uuid).removeprefix("GPU-").replace("-", "") == uuid.hex():
            return i
    return None
