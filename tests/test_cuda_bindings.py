"""NVIDIA's own cuda-bindings package drives the simulated driver."""

import os
import subprocess
import sys

import pytest

pytest.importorskip("cuda.bindings", reason="the package cuda-bindings is not installed")

PROGRAM = """
import os
import numpy as np
from cuda.bindings import driver as cu

def ok(result):
    code, *values = result
    assert code == cu.CUresult.CUDA_SUCCESS, code
    return values[0] if len(values) == 1 else values

ok(cu.cuInit(0))
device = ok(cu.cuDeviceGet(0))
assert b"simulated" in ok(cu.cuDeviceGetName(64, device))
context = ok(cu.cuDevicePrimaryCtxRetain(device))
ok(cu.cuCtxSetCurrent(context))
prop = cu.CUmemAllocationProp()
prop.type = cu.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
prop.location.type = cu.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
prop.location.id = 0
fd_type = cu.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
prop.requestedHandleTypes = fd_type
size = ok(cu.cuMemGetAllocationGranularity(
    prop, cu.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM))
address = ok(cu.cuMemAddressReserve(size, 0, 0, 0))
handle = ok(cu.cuMemCreate(size, prop, 0))
ok(cu.cuMemMap(address, size, 0, handle, 0))
desc = cu.CUmemAccessDesc()
desc.location = prop.location
desc.flags = cu.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
ok(cu.cuMemSetAccess(address, size, [desc], 1))
data = np.arange(1024, dtype=np.int32)
ok(cu.cuMemcpyHtoD(address, data.ctypes.data, data.nbytes))
fd = ok(cu.cuMemExportToShareableHandle(handle, fd_type, 0))
ok(cu.cuMemUnmap(address, size))
ok(cu.cuMemRelease(handle))
handle = ok(cu.cuMemImportFromShareableHandle(int(fd), fd_type))
os.close(int(fd))
ok(cu.cuMemMap(address, size, 0, handle, 0))
ok(cu.cuMemSetAccess(address, size, [desc], 1))
back = np.zeros_like(data)
ok(cu.cuMemcpyDtoH(back.ctypes.data, address, back.nbytes))
assert (back == data).all()
stream = ok(cu.cuStreamCreate(cu.CUstream_flags.CU_STREAM_NON_BLOCKING.value))
ok(cu.cuMemsetD8Async(address, 3, size, stream))
ok(cu.cuStreamSynchronize(stream))
ok(cu.cuStreamDestroy(stream))
free, total = ok(cu.cuMemGetInfo())
assert total - free == size, (total, free)
ok(cu.cuMemUnmap(address, size))
ok(cu.cuMemRelease(handle))
ok(cu.cuMemAddressFree(address, size))
free, total = ok(cu.cuMemGetInfo())
assert free == total
ok(cu.cuDevicePrimaryCtxRelease(device))
print("done")
"""


def test_reserve_create_map_copy_export_import_and_release(driver_path, tmp_path, node):
    if "cudasim" not in driver_path:
        pytest.skip("the GPU's driver is under test")
    (tmp_path / "libcuda.so.1").symlink_to(driver_path)
    env = {**node.env, "LD_LIBRARY_PATH": f"{tmp_path}:{os.environ.get('LD_LIBRARY_PATH', '')}"}
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, env=env, check=False)
    assert done.stdout == "done\n", done.stderr
