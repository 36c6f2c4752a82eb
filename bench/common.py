"""What the benches share: the driver by ctypes, a node of one's own, and the form of the results."""

import argparse
import contextlib
import ctypes
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from tests.cuda_types import access, prop  # noqa: E402 - the driver's structures, once for tests and benches

u64, size_t, byref = ctypes.c_uint64, ctypes.c_size_t, ctypes.byref


def arguments(description: str, **extra: dict[str, Any]) -> argparse.Namespace:
    """Parse the command line: --json, and extra options."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--json", type=Path, default=None, help="write the results here")
    for name, options in extra.items():
        parser.add_argument(f"--{name.replace('_', '-')}", **options)
    return parser.parse_args()


def machine() -> str:
    """Describe the host in a line."""
    model = next(
        (
            line.split(":", 1)[1].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if "model name" in line
        ),
        platform.machine(),
    )
    return f"{os.cpu_count()} x {model}, Linux {platform.release()}"


def result(
    metric: str, value: float, unit: str, *, at_least: float | None = None, at_most: float | None = None
) -> dict:
    """Make one result; a figure without a target holds by being measured."""
    holds = (at_least is None or value >= at_least) and (at_most is None or value <= at_most)
    target = f">= {at_least}" if at_least is not None else f"<= {at_most}" if at_most is not None else None
    return {"metric": metric, "value": value, "unit": unit, "target": target, "holds": holds}


def publish(bench: str, device: str, results: list[dict], path: Path | None) -> None:
    """Print the results as a table and write them as JSON."""
    for r in results:
        mark = "" if r["target"] is None else f"  target {r['target']}: {'holds' if r['holds'] else 'MISSED'}"
        print(f"{r['metric']:40} {r['value']:12.4g} {r['unit']}{mark}")
    document = {
        "bench": bench,
        "machine": machine(),
        "date": time.strftime("%Y-%m-%d"),
        "device": device,
        "results": results,
    }
    if path:
        path.write_text(json.dumps(document, indent=2) + "\n")


def median_seconds(f: Any, repeats: int) -> float:
    """Time a call, several times over."""
    times = []
    for _ in range(repeats):
        begin = time.perf_counter()
        f()
        times.append(time.perf_counter() - begin)
    return statistics.median(times)


@contextlib.contextmanager
def node(**settings: str) -> Iterator[Path]:
    """Give this process a runtime directory and (where simulated) a device of its own."""
    home = Path(tempfile.mkdtemp(prefix="pymux-bench-", dir="/dev/shm"))
    os.environ.update({"PYMUX_RUNTIME_DIR": str(home / "run"), "PYMUX_SIM_DIR": str(home / "sim"), **settings})
    try:
        yield home
    finally:
        subprocess.run([sys.executable, "-m", "pymux.cli", "broker", "--stop"], capture_output=True, check=False)
        shutil.rmtree(home, ignore_errors=True)


class Driver:
    """The CUDA driver that pymux uses, called directly."""

    def __init__(self) -> None:
        from pymux import _core, config

        self.path = _core.load_driver(config.load().driver)
        self.lib = ctypes.CDLL(self.path)
        self.device = _core.Device(0)
        context = ctypes.c_void_p()
        self("cuDevicePrimaryCtxRetain", byref(context), 0)
        self("cuCtxSetCurrent", context)

    def __call__(self, name: str, *args: Any) -> None:
        code = getattr(self.lib, name)(*args)
        if code != 0:
            raise RuntimeError(f"{name} returned {code}")

    def stream(self) -> ctypes.c_void_p:
        s = ctypes.c_void_p()
        self("cuStreamCreateWithPriority", byref(s), 1, 0)
        return s

    def pinned(self, nbytes: int) -> int:
        p = ctypes.c_void_p()
        self("cuMemHostAlloc", byref(p), size_t(nbytes), 0)
        return p.value or 0

    def reserve(self, nbytes: int) -> int:
        p = u64()
        self("cuMemAddressReserve", byref(p), size_t(nbytes), size_t(0), u64(0), u64(0))
        return p.value

    def create(self, nbytes: int, *, exportable: bool = True) -> int:
        h = u64()
        self("cuMemCreate", byref(h), size_t(nbytes), byref(prop(exportable)), u64(0))
        return h.value

    def map(self, ptr: int, handle: int, nbytes: int) -> None:
        self("cuMemMap", u64(ptr), size_t(nbytes), size_t(0), u64(handle), u64(0))

    def allow(self, ptr: int, nbytes: int) -> None:
        self("cuMemSetAccess", u64(ptr), size_t(nbytes), byref(access()), size_t(1))

    def unmap(self, ptr: int, nbytes: int) -> None:
        self("cuMemUnmap", u64(ptr), size_t(nbytes))

    def export(self, handle: int) -> int:
        fd = ctypes.c_int()
        self("cuMemExportToShareableHandle", byref(fd), u64(handle), 1, u64(0))
        return fd.value

    def import_(self, fd: int) -> int:
        h = u64()
        self("cuMemImportFromShareableHandle", byref(h), ctypes.c_void_p(fd), 1)
        return h.value

    def release(self, handle: int) -> None:
        self("cuMemRelease", u64(handle))

    def free_address(self, ptr: int, nbytes: int) -> None:
        self("cuMemAddressFree", u64(ptr), size_t(nbytes))
