"""torch: tensors, modules and optimizers in regions.

On a GPU a region is a ``torch.cuda.MemPool`` over the extension's pluggable allocator. Where host
code addresses the device's memory directly and torch has no such device, tensors are CPU tensors
whose storage lies in the region: a function mode moves what torch's functions return.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves, tree_map

from pymux import _core, config
from pymux.errors import DriverError, FrozenRegion, RegionError, RegionNotResident
from pymux.integrations import guards, nest, shared
from pymux.mux import Mux
from pymux.region import Region

# Functions that return a tensor which is there already, such as a parameter's gradient.
_GETTERS = frozenset({"__get__", "__set__"})

# torch frees the segments of a dead pool with its own allocator, not the pool's (pytorch issue 146431), and
# tensors may outlive a Mux: pools and their allocators live as long as the process.
_MOST_MOVED = 1024  # storages remembered before those that are gone are dropped
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
        self._local = threading.local()
        guards.guard(mux)
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
        """Put this thread's torch allocations into a region; needs a lease. The innermost block decides.

        On the CPU form these are what torch's functions return; on a GPU all.
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
        with region.serving_torch_allocator(), self._innermost(pool, device):
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

    @contextlib.contextmanager
    def _innermost(self, pool: Any, device: torch.device) -> Iterator[None]:
        """Route this thread's allocations to a pool alone, since torch takes the first that was begun."""
        if not hasattr(self._local, "pools"):
            self._local.pools = []
        pools: list[tuple[Any, torch.device, contextlib.ExitStack]] = self._local.pools
        if pools:
            pools[-1][2].close()
        stack = contextlib.ExitStack()
        pools.append((pool, device, stack))
        try:
            stack.enter_context(torch.cuda.use_mem_pool(pool, device=device))
            yield
        finally:
            pools.pop()[2].close()
            if pools:
                outer, at, again = pools[-1]
                again.enter_context(torch.cuda.use_mem_pool(outer, device=at))

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
        tensors = nest.tensors_of(what)
        elsewhere = [t for t in tensors if t.device.type != self.device.type]
        if elsewhere:
            raise TypeError(f"adopt() found a tensor on {elsewhere[0].device}; move it to {self.device} first")
        self._move(region, tensors)

    def to_host(self, mux: Mux, tensor: torch.Tensor) -> torch.Tensor:
        """See Mux.to_host."""
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"to_host() takes a torch tensor, not a {type(tensor).__name__}.")
        if is_traceable_wrapper_subclass(tensor):
            names, context = tensor.__tensor_flatten__()
            inner = {n: self.to_host(mux, getattr(tensor, n)) for n in names}
            return tensor.__tensor_unflatten__(inner, context, tensor.size(), tensor.stride()).detach()
        parts = _parts(tensor)
        region = next((r for t in parts if (r := _region_of(mux, t)) is not None), None)
        if region is None:
            return tensor.detach().to("cpu", copy=True)
        if reason := nest.unusable(tensor):
            raise TypeError(f"to_host() cannot read {reason}.")
        # The whole span of the view, read as bytes, seen through the tensor's own strides.
        with torch.utils._python_dispatch._disable_current_modes(), torch.no_grad():  # noqa: SLF001 - no public form
            span = 1 + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
            raw = torch.empty(span, dtype=tensor.dtype, device="cpu")
            region.read(tensor.data_ptr(), raw.view(torch.uint8).numpy())
            out = raw.as_strided(tensor.shape, tensor.stride()).clone()
            if tensor.is_neg():  # what is not done yet: torch puts it off until somebody reads
                out = out.neg_()
            return out.conj_physical_() if tensor.is_conj() else out

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


def _plain(*values: Any) -> list[torch.Tensor]:
    """The tensors in values whose memory is the host's and one range."""
    return [
        t
        for t in tree_leaves(values)
        if isinstance(t, torch.Tensor)
        and t.device.type == "cpu"
        and t.layout == torch.strided
        and not t.is_quantized
        and not is_traceable_wrapper_subclass(t)
        and not torch.nn.parameter.is_lazy(t)
        and torch._C._has_storage(t)  # noqa: SLF001 - no public form
    ]


class _RegionMode(TorchFunctionMode):
    """Moves what torch's functions make into a region.

    As on a GPU, where everything that a block allocates is the region's. The innermost block decides.
    """

    _inside = threading.local()

    def __init__(self, region: Region) -> None:
        super().__init__()
        self._region = region
        # Storages that several tensors may have, such as tied weights that are loaded: by what they were.
        self._moved: dict[int, tuple[StorageWeakRef, StorageWeakRef]] = {}
        self._sets = _SetMode(self)

    def __enter__(self) -> Any:
        self._sets.__enter__()
        return super().__enter__()

    def __exit__(self, *exc: object) -> None:
        super().__exit__(*exc)
        self._sets.__exit__(*exc)

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name in _GETTERS:
            return func(*args, **kwargs)
        with self.alone() as innermost:
            before = {t.untyped_storage()._cdata for t in _plain(args, kwargs)} if innermost else set()  # noqa: SLF001
            result = func(*args, **kwargs)
        for t in _plain(result) if innermost else ():
            storage = t.untyped_storage()
            if storage._cdata not in before and storage.nbytes():  # noqa: SLF001 - else a view, or nothing to do
                self.move(t, storage)
        return result

    @contextlib.contextmanager
    def alone(self) -> Iterator[bool]:
        """Keep the modes of blocks further out from what happens meanwhile; False: one further in does so."""
        if getattr(self._inside, "mode", None) is not None:
            yield False
            return
        self._inside.mode = self
        try:
            yield True
        finally:
            self._inside.mode = None

    def move(self, t: torch.Tensor, old: torch.UntypedStorage) -> None:
        """Give a tensor storage in the region, if it has none in any."""
        if self._region.mux.region_of(old.data_ptr()) is not None:
            return
        key = old._cdata  # noqa: SLF001
        new = None
        if key in self._moved and not self._moved[key][0].expired():
            new = torch.UntypedStorage._new_with_weak_ptr(self._moved[key][1].cdata)  # noqa: SLF001
        with torch.utils._python_dispatch._disable_current_modes(), torch.no_grad():  # noqa: SLF001
            if new is None:
                new = _cpu_storage(self._region, old.nbytes())
                _bytes_of(new).copy_(_bytes_of(old))
                self._moved[key] = (StorageWeakRef(old), StorageWeakRef(new))
            t.data = _view(t, new)
        if len(self._moved) > _MOST_MOVED:
            self._moved = {k: v for k, v in self._moved.items() if not v[0].expired()}


class _SetMode(TorchDispatchMode):
    """Sees the storages that torch.load() gives to tensors, by calls that function modes are not told of."""

    def __init__(self, regions: _RegionMode) -> None:
        super().__init__()
        self._regions = regions

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None) -> Any:
        with self._regions.alone() as innermost:
            result = func(*args, **(kwargs or {}))
        if innermost and func is torch.ops.aten.set_.source_Storage_storage_offset:
            for t in _plain(result):
                if t.untyped_storage().nbytes():
                    self._regions.move(t, t.untyped_storage())
        return result


class _CheckMode(TorchFunctionMode):
    """Raises before an operation touches a region's tensor whose pages may be away, or writes a frozen one."""

    _HARMLESS = frozenset(
        {"data_ptr", "untyped_storage", "__get__", "__set__", "size", "stride", "dim", "numel", "detach", "view_as",
         "requires_grad_", "is_contiguous", "element_size", "storage_offset", "type", "set_", "__hash__",
         "is_conj", "is_neg", "is_complex", "is_floating_point", "_indices", "_values", "__reduce_ex__"}
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


def _parts(t: torch.Tensor) -> list[torch.Tensor]:
    """The tensors that have a tensor's memory: itself, or those of a sparse or nested one."""
    if t.is_nested:
        return [t.values()]
    if t.layout == torch.sparse_coo:
        return [t._indices(), t._values()]  # noqa: SLF001 - the others want it coalesced
    if t.layout in {torch.sparse_csr, torch.sparse_bsr}:
        return [t.crow_indices(), t.values()]
    if t.layout in {torch.sparse_csc, torch.sparse_bsc}:
        return [t.ccol_indices(), t.values()]
    return [t]


def _region_of(mux: Mux, t: Any) -> Region | None:
    if not isinstance(t, torch.Tensor) or t.layout != torch.strided or t.numel() == 0:
        return None
    if is_traceable_wrapper_subclass(t) or not torch._C._has_storage(t):  # noqa: SLF001 - no public form
        return None
    return mux.region_of(t.data_ptr())


def check_mode(mux: Mux) -> TorchFunctionMode:
    """Return the mode of ``PYMUX_CHECK=1`` for this thread."""
    guards.check(mux)
    return _CheckMode(mux)


def _bytes_of(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _view(like: torch.Tensor, storage: torch.UntypedStorage) -> torch.Tensor:
    empty = torch.empty(0, dtype=like.dtype, device=storage.device)
    view = empty.set_(storage, like.storage_offset(), like.shape, like.stride())
    if like.is_conj():
        view = view.conj()
    return torch._neg_view(view) if like.is_neg() else view  # noqa: SLF001 - no public form


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
