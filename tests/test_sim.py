"""What only the simulated driver promises: it counts across processes, is strict, and can be told to fail."""

import ctypes
import os
import signal
import subprocess
import sys
import time

import pytest

from tests.conftest import ROOT
from tests.cuda_types import INVALID_VALUE, OUT_OF_MEMORY, UNKNOWN, prop
from tests.vmm import byref, size_t, u64

pytestmark = pytest.mark.skipif(
    os.environ.get("PYMUX_TEST_DRIVER", "sim") != "sim", reason="the GPU's driver is under test"
)


def free_bytes(cuda):
    free, total = size_t(), size_t()
    cuda.ok("cuMemGetInfo_v2", byref(free), byref(total))
    return free.value


HOLDER = """
import ctypes, os, sys
sys.path.insert(0, {root!r})
from tests.cuda_types import prop
lib = ctypes.CDLL({path!r})
assert lib.cuInit(0) == 0
h = ctypes.c_uint64()
assert lib.cuMemCreate(ctypes.byref(h), ctypes.c_size_t({size}), ctypes.byref(prop()), ctypes.c_uint64(0)) == 0
print("holds", flush=True)
sys.stdin.readline()
"""


def holder(driver_path, size):
    p = subprocess.Popen(
        [sys.executable, "-c", HOLDER.format(root=str(ROOT), path=driver_path, size=size)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert p.stdout.readline().strip() == "holds"
    return p


def test_memory_of_another_process_is_counted_and_freed_by_its_death(vmm, cuda, driver_path):
    before = free_bytes(cuda)
    p = holder(driver_path, 4 * vmm.page)
    try:
        assert free_bytes(cuda) == before - 4 * vmm.page
    finally:
        p.send_signal(signal.SIGKILL)
        p.communicate()
    assert free_bytes(cuda) == before


def test_a_descriptor_alone_keeps_memory_counted(vmm, cuda):
    before = free_bytes(cuda)
    handle = vmm.create()
    fd = vmm.export(handle)
    cuda.ok("cuMemRelease", u64(handle))
    vmm.undo.pop()
    assert free_bytes(cuda) == before - vmm.page
    os.close(fd)
    assert free_bytes(cuda) == before


def test_new_memory_is_zero(vmm):
    first = vmm.mapped()
    vmm.write(first, b"\xff" * 64)
    vmm.close()
    vmm.undo.clear()
    assert vmm.read(vmm.mapped(), 64) == bytes(64)


def test_a_copy_to_an_address_without_access_is_refused(vmm, cuda):
    ptr = vmm.reserve()
    assert cuda("cuMemcpyHtoD_v2", u64(ptr), b"x", size_t(1)) == INVALID_VALUE
    vmm.map(ptr, vmm.create())
    assert cuda("cuMemcpyHtoD_v2", u64(ptr), b"x", size_t(1)) == INVALID_VALUE


@pytest.mark.parametrize("state", ["reserved", "mapped without access", "unmapped"])
def test_touching_memory_that_is_not_there_faults(driver_path, state):
    code = f"""
import ctypes, sys
sys.path.insert(0, {str(ROOT)!r})
from tests.conftest import Cuda
from tests.vmm import Vmm, u64, size_t
cuda = Cuda({driver_path!r}); ctx = ctypes.c_void_p()
cuda.ok("cuInit", 0); cuda.ok("cuDevicePrimaryCtxRetain", ctypes.byref(ctx), 0); cuda.ok("cuCtxSetCurrent", ctx)
v = Vmm(cuda)
ptr = v.reserve()
if {state!r} != "reserved": v.map(ptr, v.create())
if {state!r} == "unmapped":
    v.allow(ptr)
    ctypes.memset(ptr, 1, 8)
    cuda.ok("cuMemUnmap", u64(ptr), size_t(v.page))
print("before", flush=True)
ctypes.memset(ptr, 1, 8)
print("after", flush=True)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout == "before\n", done.stderr
    assert done.returncode == -signal.SIGSEGV


def test_a_copy_is_not_there_before_it_was_waited_for(vmm, cuda):
    """Work that forgets to wait sees old contents, as it may on a GPU."""
    n = 4 * vmm.page
    ptr, host, stream = vmm.mapped(pages=4), ctypes.c_void_p(), ctypes.c_void_p()
    cuda.ok("cuMemHostAlloc", byref(host), size_t(n), 0)
    ctypes.memset(host, 5, n)
    cuda.ok("cuStreamCreateWithPriority", byref(stream), 1, 0)
    cuda.ok("cudasim_set_link", 0, u64(50_000_000), u64(8_000_000_000))
    cuda.ok("cuMemcpyHtoDAsync_v2", u64(ptr), host, size_t(n), stream)
    assert ctypes.string_at(ptr + n - 1, 1) == b"\0"
    cuda.ok("cuStreamSynchronize", stream)
    cuda.ok("cudasim_set_link", 0, u64(8_000_000_000), u64(8_000_000_000))
    assert ctypes.string_at(ptr + n - 1, 1) == b"\5"
    cuda.ok("cuStreamDestroy_v2", stream)
    cuda.ok("cuMemFreeHost", host)


def test_the_link_has_the_bandwidth_it_was_given(vmm, cuda):
    n = 8 * vmm.page
    ptr, host = vmm.mapped(pages=8), ctypes.c_void_p()
    cuda.ok("cuMemHostAlloc", byref(host), size_t(n), 0)
    cuda.ok("cudasim_set_link", 0, u64(100_000_000), u64(8_000_000_000))
    try:
        begin = time.monotonic()
        cuda.ok("cuMemcpyHtoD_v2", u64(ptr), host, size_t(n))
        assert time.monotonic() - begin >= n / 100_000_000
    finally:
        cuda.ok("cudasim_set_link", 0, u64(8_000_000_000), u64(8_000_000_000))
        cuda.ok("cuMemFreeHost", host)


def test_work_that_touches_unmapped_memory_poisons_the_context(driver_path):
    code = f"""
import ctypes, sys
sys.path.insert(0, {str(ROOT)!r})
from tests.conftest import Cuda
from tests.vmm import Vmm, u64, size_t, byref
cuda = Cuda({driver_path!r}); ctx = ctypes.c_void_p()
cuda.ok("cuInit", 0); cuda.ok("cuDevicePrimaryCtxRetain", ctypes.byref(ctx), 0); cuda.ok("cuCtxSetCurrent", ctx)
v = Vmm(cuda); ptr = v.mapped(pages=4); n = 4 * v.page
host, stream = ctypes.c_void_p(), ctypes.c_void_p()
cuda.ok("cuMemHostAlloc", byref(host), size_t(n), 0)
cuda.ok("cuStreamCreateWithPriority", byref(stream), 1, 0)
cuda.ok("cuMemcpyHtoDAsync_v2", u64(ptr), host, size_t(n), stream)
cuda.ok("cuMemUnmap", u64(ptr), size_t(n))
print(cuda("cuStreamSynchronize", stream), cuda("cuCtxSynchronize"))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["700", "700"]


def test_the_nth_call_fails_when_told_to(vmm, cuda):
    cuda.fail_nth("cuMemCreate", 2, OUT_OF_MEMORY)
    vmm.create()
    assert cuda("cuMemCreate", byref(u64()), size_t(vmm.page), byref(prop()), u64(0)) == OUT_OF_MEMORY
    vmm.create()
    cuda.fail_nth("cuMemCreate", 1, UNKNOWN, forever=True)
    for _ in range(2):
        assert cuda("cuMemCreate", byref(u64()), size_t(vmm.page), byref(prop()), u64(0)) == UNKNOWN
    cuda.fail_nth("cuMemCreate", 0, 0)
    vmm.create()


def test_what_is_alive_can_be_counted(vmm, cuda):
    before = cuda.counts()
    vmm.mapped(pages=2)
    after = cuda.counts()
    assert after["mappings"] - before["mappings"] == 1
    assert after["handles"] - before["handles"] == 1
    assert after["reservations"] - before["reservations"] == 1
    vmm.close()
    vmm.undo.clear()
    assert cuda.counts() == before


def test_a_descriptor_of_something_else_is_not_imported(cuda, context):
    fd = os.open("/dev/null", os.O_RDONLY)
    try:
        assert cuda("cuMemImportFromShareableHandle", byref(u64()), ctypes.c_void_p(fd), 1) == INVALID_VALUE
    finally:
        os.close(fd)


def test_nvml_reports_the_same_memory(cuda, context, driver_path, vmm):
    from pymux import _core
    from pymux.nvml import Nvml
    from pymux.wire import device_name

    uuid = device_name(_core.Device(0).uuid)
    nvml = Nvml(driver_path)
    before = nvml.memory(uuid)
    vmm.create(pages=3)
    after = nvml.memory(uuid)
    assert after.used - before.used == 3 * vmm.page
    assert after.total - after.used == free_bytes(cuda)
