"""What ``pymux doctor`` looks at: driver, device, host, broker; and how to mend what is wrong."""

from __future__ import annotations

import os
import resource
import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pymux import _core, config
from pymux.errors import PymuxError
from pymux.nvml import Nvml
from pymux.wire import device_name


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing looked at.

    Attributes:
        what: was looked at.
        ok: whether pymux can work with it.
        found: what it is.
        remedy: what to do, where something is wrong or slow.
    """

    what: str
    ok: bool
    found: str
    remedy: str = ""

    def as_dict(self) -> dict[str, Any]:
        """Return it as plain data."""
        return asdict(self)


def examine() -> list[Finding]:
    """Look at everything; a failure is a finding, never an exception."""
    try:
        settings = config.load()
        path = _core.load_driver(settings.driver)
    except PymuxError as e:
        return [Finding("driver", ok=False, found=str(e), remedy="see the message")]
    version = _core.driver_version()
    out = [Finding("driver", ok=True, found=f"{path}, CUDA {version // 1000}.{version % 1000 // 10}")]
    for ordinal in range(_core.device_count()):
        out += _guard(f"device {ordinal}", lambda o=ordinal: _device(o, path))  # type: ignore[misc]
    out += _guard("host memory", _host)
    out += _guard("broker", lambda: _broker(settings))
    if settings.expandable_segments:
        out.append(
            Finding(
                "torch allocator",
                ok=False,
                found="expandable_segments is on in PYTORCH_CUDA_ALLOC_CONF",
                remedy="remove it: torch then maps memory itself, and a region cannot hold it",
            )
        )
    return out


def _guard(what: str, look: Callable[[], list[Finding]]) -> list[Finding]:
    try:
        return look()
    except (PymuxError, OSError) as e:
        return [Finding(what, ok=False, found=str(e), remedy="see the message")]


def _device(ordinal: int, path: str) -> list[Finding]:
    device = _core.Device(ordinal)
    name = device_name(device.uuid)
    memory = Nvml(path).memory(name)
    out = [
        Finding(
            f"device {ordinal}",
            ok=True,
            found=f"{device.name}, {name}, {memory.total >> 20} MiB, {memory.used >> 20} MiB in use",
        )
    ]
    try:
        device.probe_export()
        out.append(Finding("page passing", ok=True, found="pages can be handed over as file descriptors"))
    except PymuxError as e:
        out.append(
            Finding(
                "page passing",
                ok=True,
                found=f"not possible here ({e}); pages are freed and created instead, which is slower",
                remedy="in a container, allow CUDA IPC between the jobs (same IPC namespace); "
                "PYMUX_PASS_PAGES=0 silences this",
            )
        )
    return out


def _host() -> list[Finding]:
    lines = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines())
    available = int(lines["MemAvailable"].split()[0]) >> 10
    out = [Finding("host memory", ok=available > 1024, found=f"{available} MiB available for evicted pages",
                   remedy="" if available > 1024 else "free host memory: evicted pages live there")]  # fmt: skip
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    limit = "unlimited" if soft == resource.RLIM_INFINITY else f"{soft >> 10} KiB"
    out.append(Finding("locked memory limit", ok=True, found=f"{limit} (the driver pins beyond it)"))
    _, files = resource.getrlimit(resource.RLIMIT_NOFILE)
    out.append(
        Finding(
            "open files",
            ok=files >= 1024,
            found=f"{files} at most a process; the broker holds one for each free page",
            remedy="" if files >= 4096 else "raise the hard limit (ulimit -Hn): pages beyond it are freed, not passed",
        )
    )
    shm = shutil.disk_usage("/dev/shm")  # noqa: S108 - asked about, not written
    out.append(
        Finding(
            "/dev/shm",  # noqa: S108 - asked about, not written
            ok=True,
            found=f"{shm.free >> 20} MiB free; the simulated device's memory is there",
        )
    )
    return out


def _broker(settings: config.Settings) -> list[Finding]:
    directory = settings.runtime_dir
    if not directory.exists():
        return [Finding("broker", ok=True, found=f"none runs; it will use {directory}")]
    info = directory.stat()
    if info.st_uid != os.getuid() or info.st_mode & 0o077:
        return [
            Finding("broker", ok=False, found=f"{directory} is not yours alone",
                    remedy="chmod 700 it, or set PYMUX_RUNTIME_DIR")
        ]  # fmt: skip
    return [Finding("broker", ok=True, found=f"its directory is {directory}; 'pymux status' asks it")]
