"""Fixtures: a simulated node of one's own, processes on it, and the driver by ctypes."""

import contextlib
import ctypes
import os
import shutil
import subprocess
import sys
import tempfile
import textwrap
import time
from pathlib import Path

import pytest
from hypothesis import settings

settings.register_profile("pymux", deadline=None, derandomize=True, max_examples=60)
settings.load_profile("pymux")

PATIENCE = float(os.environ.get("PYMUX_TEST_PATIENCE", "1"))  # sanitizers are slow
ROOT = Path(__file__).resolve().parent.parent
MIB = 1 << 20
PAGE = 2 * MIB

# Set before anything loads the driver in this process: tests never share a device with a user.
# Child processes that import this file share the session's.
# Each of pytest-xdist's workers has a node of its own.
_MADE = "PYMUX_TEST_HOME" not in os.environ
_HOME = Path(os.environ.get("PYMUX_TEST_HOME") or tempfile.mkdtemp(prefix="pymux-test-", dir="/dev/shm"))
if (_WORKER := os.environ.get("PYTEST_XDIST_WORKER")) and _HOME.name != _WORKER:
    _HOME /= _WORKER
    _HOME.mkdir(exist_ok=True)
os.environ["PYMUX_TEST_HOME"] = str(_HOME)
os.environ["PYMUX_SIM_DIR"] = str(_HOME / "sim")
os.environ["PYMUX_SIM_CAPACITY"] = "64M"
os.environ["PYMUX_SIM_LINK"] = "8e9"
os.environ.setdefault("PYMUX_TEST_DRIVER", "sim")
os.environ["PYMUX_DRIVER"] = os.environ["PYMUX_TEST_DRIVER"]
os.environ["PYMUX_RUNTIME_DIR"] = str(_HOME / "run")


def pytest_sessionfinish():
    subprocess.run([sys.executable, "-m", "pymux.cli", "broker", "--stop"], capture_output=True, check=False)
    shutil.rmtree(_HOME, ignore_errors=True)


@pytest.hookimpl(tryfirst=True)  # before -m selects
def pytest_collection_modifyitems(items):
    real = os.environ["PYMUX_TEST_DRIVER"] != "sim"
    for item in items:
        if real and item.path.name in {"test_driver_contract.py", "test_fingerprint.py"}:
            item.add_marker("gpu")  # the same suites, asked of the GPU's driver
        elif not real and "gpu" in item.keywords:
            item.add_marker(pytest.mark.skip(reason="needs a GPU; run with PYMUX_TEST_DRIVER set to nothing or a path"))


class Node:
    """A simulated node: its device directory, its broker's directory, and processes on it."""

    def __init__(self, home, capacity, env=None):
        self.home = home
        self.env = {
            **os.environ,
            "PYMUX_DRIVER": "sim",
            "PYMUX_SIM_DIR": str(home / "sim"),
            "PYMUX_SIM_CAPACITY": str(capacity),
            "PYMUX_RUNTIME_DIR": str(home / "run"),
            **(env or {}),
        }
        self.runtime = home / "run"
        self.processes = []

    def launch(self, command, **env):
        """Run a command on the node; talks over pipes."""
        pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
        process = subprocess.Popen(command, env={**self.env, **env}, text=True, **pipes)
        self.processes.append(process)
        return process

    def start(self, code, **env):
        """Run Python code in a process with `pymux` and helpers imported."""
        return self.launch([sys.executable, "-c", HELPERS + textwrap.dedent(code)], **env)

    def run(self, code, timeout=60, **env):
        """Run code to its end; returns stdout, fails with stderr."""
        process = self.start(code, **env)
        out, err = process.communicate(timeout=timeout * PATIENCE)
        assert process.returncode == 0, err
        return out

    def status(self):
        from pymux.cli import _request_status

        return _request_status(self.runtime / "broker.sock")

    def until(self, condition, seconds=60.0):
        """Wait for a condition on the broker's status; returns that status."""
        deadline = time.monotonic() + seconds
        while True:
            try:
                status = self.status()
                if condition(status):
                    return status
            except Exception:
                status = None
            assert time.monotonic() < deadline, f"not within {seconds} s; the last status was {status}"
            time.sleep(0.01)

    def close(self):
        for p in self.processes:
            if p.poll() is None:
                p.kill()
            for pipe in (p.stdin, p.stdout, p.stderr):
                with contextlib.suppress(BrokenPipeError):  # it died with an order unread
                    pipe.close()
            p.wait()
        subprocess.run(
            [sys.executable, "-m", "pymux.cli", "broker", "--stop"],
            env=self.env,
            capture_output=True,
            check=False,
        )
        shutil.rmtree(self.home, ignore_errors=True)


HELPERS = """
import ctypes, os, sys, time, json
import pymux
MIB = 1 << 20
PAGE = 2 * MIB
def say(x): print(x, flush=True)
def hear(): return sys.stdin.readline().strip()
def fill(block, byte):
    ctypes.memset(block.ptr, byte, block.size)
def check(block, byte):
    got = ctypes.string_at(block.ptr, block.size)
    assert got == bytes([byte]) * block.size, f"contents differ: {got[:8]!r}"
"""


@pytest.fixture
def node_factory():
    nodes = []

    def make(capacity="64M", **env):
        home = Path(tempfile.mkdtemp(prefix="pymux-test-", dir="/dev/shm"))
        nodes.append(Node(home, capacity, env))
        return nodes[-1]

    yield make
    for n in nodes:
        n.close()


@pytest.fixture
def node(node_factory):
    return node_factory()


def say(process, text="go"):
    process.stdin.write(text + "\n")
    process.stdin.flush()


def hear(process):
    line = process.stdout.readline().strip()
    if not line:
        _, err = process.communicate(timeout=20)
        pytest.fail(f"the process ended with {process.returncode}:\n{err}")
    return line


class Cuda:
    """The driver under test, by ctypes: results are CUresult numbers."""

    def __init__(self, path):
        self.lib = ctypes.CDLL(path)

    def __call__(self, name, *args):
        return getattr(self.lib, name)(*args)

    def ok(self, name, *args):
        result = self(name, *args)
        assert result == 0, f"{name} returned {result}"

    def fail_nth(self, call, n, code, forever=False):
        self.lib.cudasim_fail_nth.restype = ctypes.c_long
        return self.lib.cudasim_fail_nth(call.encode(), ctypes.c_long(n), code, int(forever))

    def counts(self):
        values = (ctypes.c_uint64 * 7)()
        self.lib.cudasim_counts(values)
        names = ("handles", "mappings", "reservations", "allocations", "streams", "events", "registrations")
        return dict(zip(names, values, strict=True))


@pytest.fixture(scope="session")
def driver_path():
    from pymux import _core

    return _core.load_driver(os.environ["PYMUX_DRIVER"])


@pytest.fixture(scope="session")
def cuda(driver_path):
    return Cuda(driver_path)


@pytest.fixture
def context(cuda):
    """The device's primary context, current on this thread."""
    ctx = ctypes.c_void_p()
    cuda.ok("cuInit", 0)
    cuda.ok("cuDevicePrimaryCtxRetain", ctypes.byref(ctx), 0)
    cuda.ok("cuCtxSetCurrent", ctx)
    yield ctx
    cuda.ok("cuCtxSetCurrent", None)
    cuda.ok("cuDevicePrimaryCtxRelease_v2", 0)


@pytest.fixture
def vmm(cuda, context):
    """Virtual-memory calls whose leftovers are undone."""
    from tests.vmm import Vmm

    v = Vmm(cuda)
    yield v
    v.close()
