"""What CUDA documents, asked of the driver under test: the simulated one, or with PYMUX_TEST_DRIVER= a real one.

Error codes are those of the CUDA driver API reference.
"""

import ctypes
import os
import subprocess
import sys

import pytest

from tests.cuda_types import (
    ALREADY_REGISTERED,
    INVALID_CONTEXT,
    INVALID_DEVICE,
    INVALID_HANDLE,
    INVALID_VALUE,
    NOT_INITIALIZED,
    NOT_READY,
    NOT_REGISTERED,
    OUT_OF_MEMORY,
    POSIX_FD,
    READ,
    SUCCESS,
    access,
    prop,
)
from tests.vmm import byref, size_t, u64


def test_a_mapped_page_keeps_what_is_copied_into_it(vmm):
    ptr = vmm.mapped()
    vmm.write(ptr + 4096, b"hello device")
    assert vmm.read(ptr + 4096, 12) == b"hello device"


def test_contents_survive_unmapping_and_mapping_elsewhere(vmm, cuda):
    handle = vmm.create()
    first, second = vmm.reserve(), vmm.reserve()
    vmm.map(first, handle)
    vmm.allow(first)
    vmm.write(first, b"moves")
    cuda.ok("cuMemUnmap", u64(first), size_t(vmm.page))
    vmm.undo.pop()
    vmm.map(second, handle)
    vmm.allow(second)
    assert vmm.read(second, 5) == b"moves"


def test_an_exported_descriptor_keeps_memory_and_contents_alive(vmm, cuda):
    ptr, handle = vmm.reserve(), vmm.create()
    vmm.map(ptr, handle)
    vmm.allow(ptr)
    vmm.write(ptr, b"passed on")
    fd = vmm.export(handle)
    cuda.ok("cuMemUnmap", u64(ptr), size_t(vmm.page))
    cuda.ok("cuMemRelease", u64(handle))
    del vmm.undo[-2:]
    imported = vmm.import_(fd)
    os.close(fd)
    vmm.map(ptr, imported)
    vmm.allow(ptr)
    assert vmm.read(ptr, 9) == b"passed on"


@pytest.mark.parametrize("size", [0, 4096, "page+1"])
def test_sizes_that_are_not_multiples_of_the_granularity_are_refused(vmm, cuda, size):
    size = vmm.page + 1 if size == "page+1" else size
    assert cuda("cuMemCreate", byref(u64()), size_t(size), byref(prop()), u64(0)) == INVALID_VALUE
    assert cuda("cuMemAddressReserve", byref(u64()), size_t(size), size_t(0), u64(0), u64(0)) == INVALID_VALUE


def test_mapping_wants_an_aligned_address_in_a_reservation_and_offset_zero(vmm, cuda):
    handle, ptr = vmm.create(), vmm.reserve()
    page = size_t(vmm.page)
    assert cuda("cuMemMap", u64(ptr + 4096), page, size_t(0), u64(handle), u64(0)) == INVALID_VALUE
    assert cuda("cuMemMap", u64(ptr), page, page, u64(handle), u64(0)) == INVALID_VALUE
    assert cuda("cuMemMap", u64(ptr), size_t(4096), size_t(0), u64(handle), u64(0)) == INVALID_VALUE
    assert cuda("cuMemMap", u64(1 << 46), page, size_t(0), u64(handle), u64(0)) == INVALID_VALUE


def test_an_address_is_mapped_once(vmm, cuda):
    ptr = vmm.mapped()
    again = cuda("cuMemMap", u64(ptr), size_t(vmm.page), size_t(0), u64(vmm.create()), u64(0))
    assert again == INVALID_VALUE


def test_part_of_a_mapping_cannot_be_unmapped(vmm, cuda):
    ptr = vmm.mapped(pages=2)
    assert cuda("cuMemUnmap", u64(ptr), size_t(vmm.page)) == INVALID_VALUE


def test_a_reservation_is_freed_whole_and_only_when_nothing_is_mapped(vmm, cuda):
    ptr = vmm.mapped(pages=2)
    assert cuda("cuMemAddressFree", u64(ptr), size_t(2 * vmm.page)) == INVALID_VALUE
    other = vmm.reserve(2)
    assert cuda("cuMemAddressFree", u64(other), size_t(vmm.page)) == INVALID_VALUE


def test_access_cannot_be_set_where_nothing_is_mapped(vmm, cuda):
    ptr = vmm.reserve()
    assert cuda("cuMemSetAccess", u64(ptr), size_t(vmm.page), byref(access()), size_t(1)) == INVALID_VALUE


def test_one_set_access_covers_a_run_of_mappings(vmm):
    ptr = vmm.reserve(3)
    for i in range(3):
        vmm.map(ptr + i * vmm.page, vmm.create())
    vmm.allow(ptr, pages=3)
    vmm.write(ptr + vmm.page - 4, b"across the edge")
    assert vmm.read(ptr + vmm.page - 4, 15) == b"across the edge"


def test_memory_that_was_not_made_exportable_is_not_exported(vmm, cuda):
    handle = vmm.create(exportable=False)
    assert cuda("cuMemExportToShareableHandle", byref(ctypes.c_int()), u64(handle), POSIX_FD, u64(0)) == INVALID_VALUE


def test_a_handle_is_released_once(vmm, cuda):
    handle = vmm.create()
    vmm.undo.pop()
    cuda.ok("cuMemRelease", u64(handle))
    assert cuda("cuMemRelease", u64(handle)) == INVALID_VALUE


def test_a_released_handle_lives_on_in_its_mapping(vmm, cuda):
    ptr, handle = vmm.reserve(), vmm.create()
    vmm.map(ptr, handle)
    vmm.allow(ptr)
    cuda.ok("cuMemRelease", u64(handle))
    vmm.write(ptr, b"still here")
    assert vmm.read(ptr, 10) == b"still here"


def test_creating_past_the_capacity_is_out_of_memory_and_leaves_the_rest(vmm, cuda):
    free, total = size_t(), size_t()
    cuda.ok("cuMemGetInfo_v2", byref(free), byref(total))
    pages = total.value // vmm.page + 1
    assert cuda("cuMemCreate", byref(u64()), size_t(pages * vmm.page), byref(prop()), u64(0)) == OUT_OF_MEMORY
    after = size_t()
    cuda.ok("cuMemGetInfo_v2", byref(after), byref(total))
    assert after.value == free.value


def test_calls_without_a_context_say_so(cuda, context):
    cuda.ok("cuCtxSetCurrent", None)
    try:
        assert cuda("cuCtxSynchronize") == INVALID_CONTEXT
        assert cuda("cuMemcpyHtoD_v2", u64(4096), b"x", size_t(1)) == INVALID_CONTEXT
    finally:
        cuda.ok("cuCtxSetCurrent", context)


def test_bad_devices_are_refused(cuda, context):
    assert cuda("cuDeviceGet", byref(ctypes.c_int()), 99) == INVALID_DEVICE


def test_streams_have_priorities_within_the_range(cuda, context):
    least, greatest = ctypes.c_int(), ctypes.c_int()
    cuda.ok("cuCtxGetStreamPriorityRange", byref(least), byref(greatest))
    assert greatest.value < least.value
    stream, priority = ctypes.c_void_p(), ctypes.c_int()
    cuda.ok("cuStreamCreateWithPriority", byref(stream), 1, greatest.value - 100)
    cuda.ok("cuStreamGetPriority", stream, byref(priority))
    assert priority.value == greatest.value
    cuda.ok("cuStreamDestroy_v2", stream)


def test_a_threads_capture_mode_is_exchanged(cuda, context):
    mode = ctypes.c_int(2)  # relaxed
    cuda.ok("cuThreadExchangeStreamCaptureMode", byref(mode))
    assert mode.value == 0, "global at first"
    cuda.ok("cuThreadExchangeStreamCaptureMode", byref(mode))
    assert mode.value == 2
    assert cuda("cuThreadExchangeStreamCaptureMode", byref(ctypes.c_int(3))) == INVALID_VALUE


def test_an_event_follows_the_work_before_it(vmm, cuda):
    ptr = vmm.mapped(pages=4)
    n = 4 * vmm.page
    host = ctypes.c_void_p()
    cuda.ok("cuMemHostAlloc", byref(host), size_t(n), 0)
    stream, event = ctypes.c_void_p(), ctypes.c_void_p()
    cuda.ok("cuStreamCreateWithPriority", byref(stream), 1, 0)
    cuda.ok("cuEventCreate", byref(event), 2)
    ctypes.memset(host, 7, n)
    cuda.ok("cuMemcpyHtoDAsync_v2", u64(ptr), host, size_t(n), stream)
    cuda.ok("cuEventRecord", event, stream)
    assert cuda("cuEventQuery", event) in {SUCCESS, NOT_READY}
    cuda.ok("cuEventSynchronize", event)
    cuda.ok("cuEventQuery", event)
    assert vmm.read(ptr + n - 3, 3) == b"\7\7\7"
    cuda.ok("cuEventDestroy_v2", event)
    cuda.ok("cuStreamDestroy_v2", stream)
    cuda.ok("cuMemFreeHost", host)


def test_a_stream_waits_for_an_event_of_another(vmm, cuda):
    ptr = vmm.mapped(pages=4)
    n = 4 * vmm.page
    host, back = ctypes.c_void_p(), ctypes.c_void_p()
    cuda.ok("cuMemHostAlloc", byref(host), size_t(n), 0)
    cuda.ok("cuMemHostAlloc", byref(back), size_t(n), 0)
    ctypes.memset(host, 9, n)
    a, b, event = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_void_p()
    cuda.ok("cuStreamCreateWithPriority", byref(a), 1, 0)
    cuda.ok("cuStreamCreateWithPriority", byref(b), 1, 0)
    cuda.ok("cuEventCreate", byref(event), 2)
    cuda.ok("cuMemcpyHtoDAsync_v2", u64(ptr), host, size_t(n), a)
    cuda.ok("cuEventRecord", event, a)
    cuda.ok("cuStreamWaitEvent", b, event, 0)
    cuda.ok("cuMemcpyDtoHAsync_v2", back, u64(ptr), size_t(n), b)
    cuda.ok("cuStreamSynchronize", b)
    assert ctypes.string_at(back.value + n - 2, 2) == b"\x09\x09"
    for s in (a, b):
        cuda.ok("cuStreamDestroy_v2", s)
    cuda.ok("cuEventDestroy_v2", event)
    cuda.ok("cuMemFreeHost", host)
    cuda.ok("cuMemFreeHost", back)


def test_the_default_stream_waits_for_blocking_streams_and_they_for_it(vmm, cuda):
    ptr = vmm.mapped(pages=4)
    n = 4 * vmm.page
    host, stream = ctypes.c_void_p(), ctypes.c_void_p()
    cuda.ok("cuMemHostAlloc", byref(host), size_t(n), 0)
    ctypes.memset(host, 4, n)
    cuda.ok("cuStreamCreateWithPriority", byref(stream), 0, 0)
    cuda.ok("cuMemcpyHtoDAsync_v2", u64(ptr), host, size_t(n), stream)
    assert vmm.read(ptr + n - 2, 2) == b"\x04\x04", "read on the default stream"
    cuda.ok("cuMemsetD32Async", u64(ptr), 0x01020304, size_t(n // 4), None)
    assert cuda("cuMemsetD32Async", u64(ptr + 2), 0, size_t(1), None) == 1  # CUDA_ERROR_INVALID_VALUE
    cuda.ok("cuMemsetD8Async", u64(ptr), 8, size_t(n), None)
    cuda.ok("cuMemcpyDtoHAsync_v2", host, u64(ptr), size_t(n), stream)
    cuda.ok("cuStreamSynchronize", stream)
    assert ctypes.string_at(host.value + n - 2, 2) == b"\x08\x08"
    cuda.ok("cuStreamDestroy_v2", stream)
    cuda.ok("cuMemFreeHost", host)


def test_host_memory_is_registered_once(cuda, context):
    import mmap

    m = mmap.mmap(-1, 1 << 20)
    at = ctypes.c_void_p(ctypes.addressof(ctypes.c_char.from_buffer(m)))
    cuda.ok("cuMemHostRegister_v2", at, size_t(1 << 20), 0)
    assert cuda("cuMemHostRegister_v2", at, size_t(1 << 20), 0) == ALREADY_REGISTERED
    cuda.ok("cuMemHostUnregister", at)
    assert cuda("cuMemHostUnregister", at) == NOT_REGISTERED


def test_every_call_fails_in_a_forked_child(driver_path):
    code = f"""
import ctypes, os
lib = ctypes.CDLL({driver_path!r})
assert lib.cuInit(0) == 0
pid = os.fork()
if pid == 0:
    n = ctypes.c_int()
    os._exit(lib.cuDeviceGetCount(ctypes.byref(n)))
_, status = os.waitpid(pid, 0)
print(os.waitstatus_to_exitcode(status))
"""
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert int(out.stdout) == NOT_INITIALIZED


def test_events_work_across_processes(cuda, context, driver_path, vmm):
    event, handle = ctypes.c_void_p(), ctypes.create_string_buffer(64)
    cuda.ok("cuEventCreate", byref(event), 2 | 4)
    cuda.ok("cuIpcGetEventHandle", handle, event)
    cuda.ok("cuEventRecord", event, None)
    code = f"""
import ctypes, sys
lib = ctypes.CDLL({driver_path!r})
class Handle(ctypes.Structure):
    _fields_ = [("bytes", ctypes.c_char * 64)]
ctx, event = ctypes.c_void_p(), ctypes.c_void_p()
assert lib.cuInit(0) == 0
assert lib.cuDevicePrimaryCtxRetain(ctypes.byref(ctx), 0) == 0
assert lib.cuCtxSetCurrent(ctx) == 0
h = Handle.from_buffer_copy(bytes.fromhex(sys.argv[1]))
assert lib.cuIpcOpenEventHandle(ctypes.byref(event), h) == 0
assert lib.cuEventSynchronize(event) == 0
assert lib.cuEventQuery(event) == 0
"""
    subprocess.run([sys.executable, "-c", code, handle.raw.hex()], check=True, timeout=30)
    cuda.ok("cuEventDestroy_v2", event)


def test_read_only_access_lets_copies_out(vmm, cuda):
    ptr = vmm.mapped()
    vmm.write(ptr, b"read me")
    vmm.allow(ptr, flags=READ)
    assert vmm.read(ptr, 7) == b"read me"
    vmm.allow(ptr)


def test_get_proc_address_finds_versioned_functions(cuda):
    fn = ctypes.c_void_p()
    cuda.ok("cuGetProcAddress_v2", b"cuMemFree", byref(fn), 13000, u64(0), None)
    assert fn.value == ctypes.cast(cuda.lib.cuMemFree_v2, ctypes.c_void_p).value
    assert cuda("cuGetProcAddress_v2", b"cuNoSuchThing", byref(fn), 13000, u64(0), None) != SUCCESS


def test_bad_streams_and_events_are_refused(cuda, context):
    if os.environ["PYMUX_TEST_DRIVER"] != "sim":
        pytest.skip("a GPU's driver may crash on an invented handle; only the simulated one checks")
    bogus = ctypes.c_void_p(0x1230)
    assert cuda("cuStreamSynchronize", bogus) == INVALID_HANDLE
    assert cuda("cuEventQuery", bogus) == INVALID_HANDLE
