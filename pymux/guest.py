"""A process that knows nothing of regions, shared as a whole: by the driver's checkpoint calls, behind a lease.

What it is not: as good as regions. All of the process's device memory moves each time that another job wants the
device, at the driver's speed, with all of its contents.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

from pymux import _core, config
from pymux.errors import CudaError, DeviceOutOfMemory, DriverError, LeaseError, PymuxError
from pymux.mux import Mux, connect
from pymux.region import Region
from pymux.wire import device_name

_CLAIM = "claim"  # name of the region that stands for the process's memory
_WATCH_SECONDS = 0.005  # how soon a process that waits for its next phase gives the device away
THAW_SECONDS = 60.0  # how long a process that is left behind is tried to be set going again
_LONGEST = 86400.0  # seconds that a process may take to let itself be stopped
_FREE_SECONDS = 5.0  # within this, memory that was just given up is free
_RETRY_SECONDS = 1.0  # after which a process that could not be stopped is tried again


def opaque(
    pid: int,
    *,
    job: str | None = None,
    device: int = 0,
    device_memory: int | str = 0,
    lock_timeout: float = 30.0,
) -> Opaque:
    """Take over a process that uses the device without pymux; it runs in phases from then on.

    Args:
        pid: of a CUDA process of this user.
        job: name of the job; default ``PYMUX_JOB``, or the script's name.
        device: ordinal of the device that it uses.
        device_memory: the most that it will use there, in bytes or such as ``"20G"``; 0: what it uses now.
        lock_timeout: seconds that a call of the process may take until it lets itself be stopped.

    Returns:
        The process, stopped until its first `Opaque.phase`. Close it, use it as a context manager, or leave it to
        the end of this process, which sets it going again, too.

    Raises:
        CapacityError: the device cannot hold it.
        CudaError: the driver does not checkpoint it, for instance because it shares memory with others. It runs on.
        DriverError: the driver has no such calls (CUDA 12.8), or there is no such process.
    """
    config.check_int("pid", pid, 1, 2**31 - 1)
    memory = config.check_size("device_memory", device_memory)
    config.check_seconds("lock_timeout", lock_timeout)
    settings = config.load()
    driver = _core.load_driver(settings.driver)
    _state(pid)
    mux = connect(job or settings.job, name=f"opaque.{pid}", device=device)
    try:
        return Opaque(mux, pid, driver, device_memory=memory, lock_timeout=min(lock_timeout, _LONGEST))
    except BaseException:
        mux.close()
        raise


def _state(pid: int) -> str:
    try:
        return _core.checkpoint_state(pid)
    except CudaError as e:
        raise DriverError(f"process {pid} is no CUDA process of this user, or has ended ({e}).") from e


def thaw(pid: int, seconds: float, *, retry: type[PymuxError] = PymuxError) -> None:
    """Set a process going that is locked or checkpointed.

    Args:
        pid: of the process.
        seconds: for how long errors of the kind `retry` are tried again, such as no room on the device.
        retry: others are raised at once.

    Raises:
        CudaError, DeviceOutOfMemory: the driver does not.
        DriverError: the process has ended.
    """
    until = time.monotonic() + seconds
    while True:
        state = _state(pid)
        try:
            if state == "checkpointed":
                _core.checkpoint_restore(pid)
            if state != "running":
                _core.checkpoint_unlock(pid)
        except retry:
            if time.monotonic() > until:
                raise
            time.sleep(0.01)
            continue
        return


class Opaque:
    """A process that runs in phases; see `opaque`.

    Attributes:
        pid: of the process.
        mux: the connection that takes its leases.
        nbytes: bytes of device memory that are set aside for it while it runs.
    """

    def __init__(self, mux: Mux, pid: int, driver: str, *, device_memory: int, lock_timeout: float) -> None:
        self.pid = pid
        self.mux = mux
        self._lock_ms = max(1, int(lock_timeout * 1000))
        self._guard = threading.RLock()  # guards what follows
        self._phase: Any = None  # the open phase of mux
        self._open = False  # and of this
        self._closed = False
        self._retry_at = 0.0
        # Should this process be killed, another sets the one that is stopped going again.
        self._guardian = subprocess.Popen(
            [sys.executable, "-m", "pymux.guardian", str(pid), driver], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL
        )
        try:
            self.nbytes = self._measure(driver, device_memory)
            agent = mux._agents[0]  # noqa: SLF001 - a claim is no region of a user's
            core = agent.create_region(name=_CLAIM, keep=False, fingerprint=False, frozen=False, claim=True)
            claim = Region(mux, core, 0, frozen=False)
            mux._add(claim)  # noqa: SLF001
            with mux.phase("claim"):
                self._block = claim.allocate(self.nbytes)
        except BaseException:
            self._dismiss()
            raise
        self._watcher = threading.Thread(target=self._watch, name=f"pymux-opaque-{pid}", daemon=True)
        self._watcher.start()

    def _measure(self, driver: str, least: int) -> int:
        """Stop the process, and see how much memory that frees."""
        from pymux.nvml import Nvml  # noqa: PLC0415 - only the broker and this ask NVML

        nvml = Nvml(driver)
        device = device_name(self.mux.uuid)
        with self.mux.phase("take over"):
            before = nvml.memory(device).used
            self._lock()
            self._save()
            return max(least, before - nvml.memory(device).used, 1)

    def _lock(self) -> None:
        _core.checkpoint_lock(self.pid, self._lock_ms)

    def _save(self) -> None:
        """Checkpoint the locked process; where that fails it runs on."""
        try:
            _core.checkpoint_save(self.pid)
        except PymuxError:
            with contextlib.suppress(PymuxError):
                _core.checkpoint_unlock(self.pid)
            raise

    @property
    def state(self) -> str:
        """``"running"``, ``"locked"`` (on the device), ``"checkpointed"`` (on the host), or ``"failed"``.

        Raises:
            DriverError: the process has ended.
        """
        return _state(self.pid)

    @contextlib.contextmanager
    def phase(self, name: str = "run", **options: Any) -> Iterator[None]:
        """Let the process run for the body, with the device its own.

        Afterwards it is stopped, and stays on the device for as long as nobody else wants that.

        Args:
            name: of the phase.
            **options: of `Mux.phase`, but for regions.

        Raises:
            CudaError: it could not be stopped, such as in the middle of a long call. It runs on and keeps the device;
                the next phase, or `close`, tries again. Or it could not be restored; it is checkpointed still.
            DriverError: it has ended.
            LeaseError: a phase of it is open.
        """
        self._enter(name, options)
        try:
            yield
        finally:
            self._leave()

    def _enter(self, name: str, options: dict[str, Any]) -> None:
        with self._guard:
            if self._closed:
                raise LeaseError(f"process {self.pid} was given free by close().")
            if self._open:
                raise LeaseError(f"process {self.pid} is in a phase already.")
            if self._phase is None:
                phase = self.mux.phase(name, uses=(_CLAIM,), **options)
                self.mux._enter(phase, detached=True)  # noqa: SLF001 - the watcher may end it
                self._phase = phase
            try:
                thaw(self.pid, _FREE_SECONDS, retry=DeviceOutOfMemory)
            except PymuxError:
                self._give_back()
                _state(self.pid)  # an end of the process says it better
                raise
            self._open = True

    def _leave(self) -> None:
        with self._guard:
            self._open = False
            try:
                self._lock()
            except PymuxError:
                if self._alive():
                    raise
                self._give_back()

    def _alive(self) -> bool:
        try:
            _state(self.pid)
        except DriverError:
            return False
        return True

    def _give_back(self) -> None:
        phase, self._phase = self._phase, None
        if phase is not None:
            phase.__exit__(None, None, None)

    def _watch(self) -> None:
        """Between phases: the device goes to whoever wants it, once the process's memory is in the host's."""
        while not self._closed:
            time.sleep(_WATCH_SECONDS)
            if self._phase is None or self._open or not self.mux.recalled or time.monotonic() < self._retry_at:
                continue
            with self._guard:
                if self._phase is not None and not self._open and self._put_out():
                    self._give_back()

    def _put_out(self) -> bool:
        """Bring the process's memory to the host; False: it does not let itself be stopped now."""
        try:
            if _state(self.pid) == "running":  # it could not be stopped at the end of its phase
                self._lock()
            if _state(self.pid) == "locked":
                self._save()
        except DriverError:
            return True  # it has ended
        except PymuxError:
            self._retry_at = time.monotonic() + _RETRY_SECONDS
            return False
        return True

    def share(self, seconds: float = 10.0) -> None:
        """Run the process until it ends; while others want the device it has it for so many seconds at a time.

        Args:
            seconds: of a turn; at least what swapping it out and in takes, several times over.

        Raises:
            CudaError: as `phase`.
        """
        while self._alive():
            try:
                with self.phase("turn", expect=seconds):
                    begin = time.monotonic()
                    while self._alive() and not (self.mux.recalled and time.monotonic() > begin + seconds):
                        time.sleep(0.02)
            except DriverError:
                if self._alive():
                    raise
            while self._phase is not None and self.mux.recalled:
                time.sleep(_WATCH_SECONDS)  # the one who waits is served first

    def close(self) -> None:
        """Set the process going without pymux, once the device is its own; it is not shared any more. Idempotent.

        Raises:
            CudaError: it could not be restored within a minute; it is tried further, by a process in the background.
        """
        with self._guard:
            if self._closed:
                return
            self._closed = True
        self._watcher.join()
        try:
            if self._alive() and _state(self.pid) == "checkpointed" and self._phase is None:
                with self.mux.phase("close", uses=(_CLAIM,)):
                    thaw(self.pid, THAW_SECONDS)
        finally:
            self._dismiss()

    def _dismiss(self) -> None:
        """The guardian sets the process going, if nobody has, and ends."""
        assert self._guardian.stdin is not None
        self._guardian.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._guardian.wait(THAW_SECONDS)
        self.mux.close()

    def __enter__(self) -> Opaque:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
