"""Whose turn it is to have a phase, among the threads and tasks of a process.

What it is not: it knows neither broker nor device. A Mux has one of these; who has the turn, and nobody else, enters
and leaves phases at the agents.

Invariants: one has the turn at a time; turns go in the order of asking, but for who comes back within a millisecond of
that order: two threads with short phases would else change places, and the interpreter's lock, at each of them; who
gives up waiting is skipped, also when its turn has come in the same moment; nobody waits where the wait keeps the one
who has the turn from ending it.
"""

from __future__ import annotations

import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from pymux.errors import AcquireTimeout, LeaseError

DUE_SECONDS = 0.001  # after which who waits is not overtaken any more
TELL_SECONDS = 0.25  # how often somebody who waits tells the broker for whom, and hears whether it would be for ever

Tell = Callable[[int, int], None]


def opener() -> tuple[int, int]:
    """Who calls: a number for the running task, or else for the thread; and the thread's.

    Both are addresses in this process, so that the numbers of tasks and threads differ.
    """
    thread = threading.get_ident()
    asyncio = sys.modules.get("asyncio")
    if asyncio is not None:
        loop = asyncio._get_running_loop()  # documented; get_running_loop() raises where none runs  # noqa: SLF001
        if loop is not None and (task := asyncio.current_task(loop)) is not None:
            return id(task), thread
    return thread, thread


@dataclass(slots=True, eq=False)
class _Waiter:
    opener: int
    thread: int
    wake: Callable[[], None]
    due: bool = False
    told: bool = False


class Turns:
    """The turns of one Mux.

    Args:
        tell: called now and then while somebody waits, with the numbers of who waits and who has the turn, and at the
            end with 0; raises what should end the wait.
    """

    def __init__(self, tell: Tell) -> None:
        self._tell = tell
        self._mutex = threading.Lock()  # guards what follows
        self._holder = 0  # 0: nobody, or somebody who is none of the openers
        self._thread = 0
        self._taken = False
        self._phase = ""
        self._queue: deque[_Waiter] = deque()

    def take(self, who: int, thread: int, phase: str, timeout: float | None) -> float | None:
        """Wait for the turn.

        Args:
            who: number of the opener; 0: none, for phases that no thread or task is inside of.
            thread: that it runs on.
            phase: name of its phase.
            timeout: seconds; None: as long as it takes.

        Returns:
            What is left of `timeout`.

        Raises:
            AcquireTimeout: it did not come in time.
            DeadlockError: it would never come.
            LeaseError: the caller has the turn, or keeps who has it from going on.
        """
        if self.take_free(who, thread, phase):
            return timeout
        lock = threading.Lock()
        lock.acquire()
        waiter = self._join(who, thread, phase, lock.release, blocks=True)
        if waiter is None:
            return timeout
        deadline = None if timeout is None else time.monotonic() + timeout
        try:
            while not lock.acquire(timeout=_slice(waiter, deadline)):
                if self._claim(waiter):
                    break
                self._look(waiter, phase, timeout, deadline)
        except BaseException:
            self._give_up(waiter)
            raise
        finally:
            if waiter.told:
                self._tell(who, 0)
        self._phase = phase
        return None if deadline is None else max(0.0, deadline - time.monotonic())

    async def take_async(self, who: int, thread: int, phase: str, timeout: float | None) -> float | None:
        """Wait for the turn without blocking the event loop; as `take`."""
        import asyncio  # noqa: PLC0415 - a program that awaits this has it

        if self.take_free(who, thread, phase):
            return timeout
        loop = asyncio.get_running_loop()
        turn: asyncio.Future[None] = loop.create_future()

        def wake() -> None:
            loop.call_soon_threadsafe(_resolve, turn)

        waiter = self._join(who, thread, phase, wake, blocks=False)
        if waiter is None:
            return timeout
        deadline = None if timeout is None else time.monotonic() + timeout
        try:
            while not (await asyncio.wait([turn], timeout=_slice(waiter, deadline)))[0]:
                if self._claim(waiter):
                    break
                self._look(waiter, phase, timeout, deadline)
        except BaseException:
            self._give_up(waiter)
            raise
        finally:
            if waiter.told:
                self._tell(who, 0)
        self._phase = phase
        return None if deadline is None else max(0.0, deadline - time.monotonic())

    def is_of(self, who: int, thread: int) -> bool:
        """Whether this opener has the turn."""
        return self._holder in {who, thread}

    def give(self) -> None:
        """Let the next one have the turn."""
        while True:
            with self._mutex:
                waiter = next((w for w in self._queue if w.due), None)
                if waiter is None:
                    self._taken, self._holder, self._thread = False, 0, 0
                    return
                self._queue.remove(waiter)
                self._holder, self._thread = waiter.opener, waiter.thread
            try:
                waiter.wake()
            except RuntimeError:
                continue  # its event loop is closed: it will not come
            return

    def take_free(self, who: int, thread: int, phase: str) -> bool:
        """Take the turn if nobody has it."""
        with self._mutex:
            if self._taken:
                return False
            self._taken, self._holder, self._thread, self._phase = True, who, thread, phase
            return True

    def _join(self, who: int, thread: int, phase: str, wake: Callable[[], None], *, blocks: bool) -> _Waiter | None:
        """Queue up; None: the turn was free after all."""
        with self._mutex:
            if not self._taken:
                self._taken, self._holder, self._thread, self._phase = True, who, thread, phase
                return None
            if who and self._holder in {who, thread}:
                raise LeaseError(
                    f"phase {phase!r} was opened inside phase {self._phase!r} of the same client. Phases do not nest: "
                    f"leave the outer one first, or use lease.idle() for a wait inside it."
                )
            if blocks and any(
                there == thread != number
                for number, there in [(self._holder, self._thread), *((w.opener, w.thread) for w in self._queue)]
            ):
                raise LeaseError(
                    f"phase {phase!r} would block the event loop that another task needs to end its phase "
                    f"({self._phase!r}). Use 'async with mux.phase(...)' in coroutines."
                )
            waiter = _Waiter(who, thread, wake)
            self._queue.append(waiter)
            return waiter

    def _claim(self, waiter: _Waiter) -> bool:
        """After a first wait: nobody else is before it from now on; whether it has the turn."""
        with self._mutex:
            waiter.due = True
            if self._taken:
                return False
            self._queue.remove(waiter)
            self._taken, self._holder, self._thread = True, waiter.opener, waiter.thread
            return True

    def _look(self, waiter: _Waiter, phase: str, timeout: float | None, deadline: float | None) -> None:
        if deadline is not None and time.monotonic() >= deadline:
            raise AcquireTimeout(
                f"phase {phase!r} did not get its turn within {timeout:g} s: phase {self._phase!r} of the same client "
                f"is open in another thread or task."
            )
        holder = self._holder
        if holder and waiter.told:
            self._tell(waiter.opener, holder)
        waiter.told = True  # the next time; most waits are over by then

    def _give_up(self, waiter: _Waiter) -> None:
        with self._mutex:
            if waiter in self._queue:
                self._queue.remove(waiter)
                return
        self.give()  # it had come in the same moment


def _slice(waiter: _Waiter, deadline: float | None) -> float:
    most = TELL_SECONDS if waiter.due else DUE_SECONDS
    return most if deadline is None else min(most, max(0.0, deadline - time.monotonic()))


def _resolve(turn: Any) -> None:
    if not turn.done():
        turn.set_result(None)
