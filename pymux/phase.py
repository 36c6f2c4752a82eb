"""A phase and the lease that it gives: what a body may do while it has the device.

What it is not: entering and leaving are the Mux's; these are what its caller holds meanwhile.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar, cast

from pymux import _core, config
from pymux.errors import ConfigError, LeaseError, UnknownRegion

if TYPE_CHECKING:
    from pymux.mux import Mux
    from pymux.region import Region

F = TypeVar("F", bound=Callable[..., Any])

_MAX_NAMES = 1023  # bytes; the message to the members has room for so many
_MAX_REGIONS = 64  # a bit each, by which members say what they have


@dataclass(frozen=True, kw_only=True, slots=True)
class PhaseOptions:
    """What `Mux.phase` was told."""

    name: str
    uses: tuple[str, ...] | None
    writes: tuple[str, ...] | None
    lazy: tuple[str, ...]
    expect: float
    timeout: float | None
    priority: int
    overlap: bool
    devices: tuple[int, ...]
    fills: str = ""  # region whose block or adopt() the phase is for, which may write it though it is frozen

    def for_members(self) -> str:
        """The regions, as the group's other members are told (csrc/wire.h, Names).

        Raises:
            ConfigError: the names are too long.
        """
        used = ["U"] if self.uses is None else [f"u{n}" for n in self.uses if n not in self.lazy]
        written = ["W"] if self.writes is None else [f"w{n}" for n in self.writes]
        text = "\n".join([*used, *(f"l{n}" for n in self.lazy), *written])
        names = {*(self.uses or ()), *(self.writes or ()), *self.lazy}
        if len(text.encode()) > _MAX_NAMES or len(names) > _MAX_REGIONS:
            raise ConfigError(
                f"phase {self.name!r} names {len(names)} regions in {len(text.encode())} bytes; a group's phase has "
                f"room for {_MAX_REGIONS} and {_MAX_NAMES}. Use fewer, shorter names."
            )
        return text


@dataclass(frozen=True, kw_only=True, slots=True)
class Entry:
    """How a phase is entered: by which agent, with what, and what is resident then.

    `epoch`: how many regions there were; -1: good for one time.
    """

    epoch: int
    opener: _core.Agent
    request: _core.PhaseRequest
    eager: frozenset[str]


class Phase:
    """A phase of a Mux; see `Mux.phase`.

    ``with`` and ``async with`` hold it for a block; as a decorator it is held while a function, a coroutine, a
    generator or an asynchronous generator runs, from its first step to its end.
    """

    opener: _core.Agent

    def __init__(self, mux: Mux, options: PhaseOptions) -> None:
        self.mux = mux
        self.options = options
        self.entry: Entry | None = None
        self.open = False
        self.entered = 0.0
        self.ran = 0.0  # seconds before the last break
        self.guests = 0  # blocks of regions that other threads and tasks have open in it
        self.resident: set[str] = set()  # regions that the body may touch now
        self.done: set[str] = set()  # and those it said it is done with
        self.stream: contextlib.AbstractContextManager[Any] | None = None

    @property
    def name(self) -> str:
        """Name of the phase."""
        return self.options.name

    def __enter__(self) -> Lease:
        self.mux._enter(self)  # noqa: SLF001 - two halves of one thing
        return Lease(self)

    def __exit__(self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None) -> None:
        if (exc is not None or self.mux.forked) and self._is_over(exc):
            return
        self.mux._leave(self)  # noqa: SLF001

    async def __aenter__(self) -> AsyncLease:
        await self.mux._enter_async(self)  # noqa: SLF001
        return AsyncLease(self)

    async def __aexit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        if self._is_over(exc):
            return
        await self.mux._leave_async(self)  # noqa: SLF001

    def _is_over(self, exc: BaseException | None) -> bool:
        """Whether the lease is gone already, such as when idle() did not get it back; then `exc` says why."""
        if self.mux.forked:
            return True  # it is the parent's
        return exc is not None and not self.open

    def __call__(self, function: F) -> F:
        """Hold the phase whenever `function` runs.

        Raises:
            TypeError: `function` cannot be called; or (when it is) it returned a coroutine or a generator without
                being declared as one, whose body would run after the phase.
        """
        if not callable(function):
            raise TypeError(f"phase {self.name!r} decorates functions; {type(function).__name__} cannot be called.")
        plain = inspect.unwrap(function, stop=_is_lazy)
        if not _is_lazy(plain) and _is_lazy(getattr(type(plain), "__call__", None)):  # noqa: B004 - is it lazy?
            plain = type(plain).__call__
        wrapper: Any
        if inspect.isasyncgenfunction(plain):
            wrapper = self._around_async_generator(function)
        elif inspect.iscoroutinefunction(plain):
            wrapper = self._around_coroutine(function)
        elif inspect.isgeneratorfunction(plain):
            wrapper = self._around_generator(function)
        else:
            wrapper = self._around_function(function)
        decorated: Any = functools.wraps(function)(wrapper)
        return cast("F", decorated)

    def _again(self) -> Phase:
        """Of the same options; calls may overlap."""
        return Phase(self.mux, self.options)

    def _around_function(self, function: Callable[..., Any]) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            with self._again():
                result = function(*args, **kwargs)
                if inspect.isawaitable(result) or inspect.isgenerator(result) or inspect.isasyncgen(result):
                    if close := getattr(result, "close", None):
                        close()
                    raise TypeError(
                        f"phase {self.name!r} decorates {getattr(function, '__name__', function)!r}, which returned a "
                        f"{type(result).__name__}: its body would run after the phase. Put the decorator at the "
                        f"'async def' or the generator itself."
                    )
                return result

        return call

    def _around_coroutine(self, function: Callable[..., Any]) -> Any:
        async def call(*args: Any, **kwargs: Any) -> Any:
            async with self._again():
                return await function(*args, **kwargs)

        return call

    def _around_generator(self, function: Callable[..., Any]) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            with self._again():
                return (yield from function(*args, **kwargs))

        return call

    def _around_async_generator(self, function: Callable[..., Any]) -> Any:
        async def call(*args: Any, **kwargs: Any) -> AsyncGenerator[Any, Any]:
            async with self._again(), contextlib.aclosing(function(*args, **kwargs)) as steps:
                step = steps.asend(None)
                while True:
                    try:
                        value = await step
                    except StopAsyncIteration:
                        return
                    try:
                        step = steps.asend((yield value))
                    except GeneratorExit:
                        raise
                    except BaseException as e:  # noqa: BLE001 - what athrow() was given is for the body
                        step = steps.athrow(e)

        return call

    def __repr__(self) -> str:
        return f"<Phase {self.name!r} of {self.mux.job!r}>"


def _is_lazy(function: Any) -> bool:
    """Whether a call only makes an object whose body runs later."""
    return (
        inspect.isasyncgenfunction(function)
        or inspect.iscoroutinefunction(function)
        or inspect.isgeneratorfunction(function)
    )


class _Leased:
    """What `Lease` and `AsyncLease` have in common."""

    def __init__(self, phase: Phase) -> None:
        self._phase = phase
        self._pressed = phase.opener.pressed

    @property
    def phase(self) -> str:
        """Name of the phase."""
        return self._phase.name

    @property
    def recalled(self) -> bool:
        """Whether somebody waits for the device."""
        return self._phase.mux.recalled

    def _used(self, region: str, call: str) -> Region:
        p, o = self._phase, self._phase.options
        p.mux._lookup([region])  # noqa: SLF001
        if not p.open:
            raise LeaseError(f"{call}({region!r}) after phase {p.name!r} ended.")
        if o.uses is not None and region not in o.uses and region not in o.lazy:
            raise UnknownRegion(f"phase {p.name!r} does not use region {region!r}; name it in uses= or lazy=.")
        return p.mux.regions[region]

    def _require(self, region: str) -> None:
        r = self._used(region, "require")
        r.agent.require(r.core)
        self._phase.resident.add(region)

    def _done_with(self, region: str) -> None:
        r = self._used(region, "done_with")
        self._phase.resident.discard(region)
        self._phase.done.add(region)
        r.agent.done_with(r.core)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of phase {self.phase!r}{', recalled' if self.recalled else ''}>"


class Lease(_Leased):
    """The right to run on the device, while a phase is open."""

    def require(self, region: str) -> None:
        """Wait until a lazy region is resident.

        Raises:
            UnknownRegion: there is no such region, or the phase does not use it.
            LeaseError: the phase has ended.
            DeviceOutOfMemory: the device has no room for it.
        """
        self._require(region)

    def done_with(self, region: str) -> None:
        """Say that the rest of the phase does not touch a region.

        Waits for the device work submitted so far. Then what changed is written back while the phase goes on,
        and who waits for the device may have the region's pages.

        Raises:
            UnknownRegion: there is no such region, or the phase does not use it.
            LeaseError: the phase has ended.
        """
        self._done_with(region)

    @contextlib.contextmanager
    def idle(self, expect: float = 0.0) -> Iterator[None]:
        """Lend the device out for the length of a ``with`` block inside the phase.

        Tensors of regions must not be touched inside the block. Other threads and tasks of this process may have
        their phases meanwhile.

        Args:
            expect: seconds that the block is expected to take. Until then only phases run that are expected to be
                over by then, and this one is next after them. 0: unknown; whoever waits may run.

        Raises:
            ConfigError: `expect` is negative.
            LeaseError: the phase has ended.
        """
        p = self._phase
        check_break(p, expect)
        p.mux._leave(p, end=False, back=expect)  # noqa: SLF001
        try:
            yield
        finally:
            if not p.mux.forked:
                p.mux._enter(p, resumes=True)  # noqa: SLF001

    def yield_point(self) -> bool:
        """Let a waiting job run here, if the broker's policy says so; returns whether the device was away.

        Otherwise it costs well under a microsecond, and is for the inside of loops: between decode steps or
        micro-batches.
        """
        if not self._pressed():
            return False
        with self.idle():
            pass
        return True


class AsyncLease(_Leased):
    """The right to run on the device, while a phase is open by ``async with``: `Lease` with calls to be awaited."""

    async def require(self, region: str) -> None:
        """See `Lease.require`."""
        await self._phase.mux._beside(lambda: self._require(region))  # noqa: SLF001

    async def done_with(self, region: str) -> None:
        """See `Lease.done_with`."""
        await self._phase.mux._beside(lambda: self._done_with(region))  # noqa: SLF001

    @contextlib.asynccontextmanager
    async def idle(self, expect: float = 0.0) -> AsyncIterator[None]:
        """See `Lease.idle`: ``async with lease.idle():``."""
        p = self._phase
        check_break(p, expect)
        await p.mux._leave_async(p, end=False, back=expect)  # noqa: SLF001
        try:
            yield
        finally:
            if not p.mux.forked:
                await p.mux._enter_async(p, resumes=True)  # noqa: SLF001

    async def yield_point(self) -> bool:
        """See `Lease.yield_point`."""
        if not self._pressed():
            return False
        async with self.idle():
            pass
        return True


def check_break(phase: Phase, expect: float) -> None:
    """Raise unless the phase may be interrupted for so many seconds."""
    config.check_seconds("idle(expect)", expect)
    if not phase.open:
        raise LeaseError(f"idle() after phase {phase.name!r} ended.")
