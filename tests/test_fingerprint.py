"""The fingerprint: one hash, in the kernel's source, in the simulated driver and in its description."""

import ctypes
import os
import random
import shutil
import struct
import subprocess
from ctypes import byref

import pytest

from tests.conftest import ROOT

MASK = (1 << 64) - 1
BLOCKS, THREADS = 3, 64

# Enough of CUDA for a host compiler to run the kernel: a thread for each thread of a block, and
# shuffles as exchanges between barriers.
SHIM = """
#include <barrier>
#include <cstdio>
#include <memory>
#include <thread>
#include <vector>
#define __global__
#define __host__
#define __device__
#define __shared__ static
struct ulonglong2 { unsigned long long x, y; };
struct Dim { unsigned x; };
static Dim gridDim, blockDim;
static thread_local Dim blockIdx, threadIdx;
static std::unique_ptr<std::barrier<>> everyone;
static unsigned long long exchange[1024];
static void __syncthreads() { everyone->arrive_and_wait(); }
static unsigned long long __shfl_down_sync(unsigned, unsigned long long v, int offset) {
  exchange[threadIdx.x] = v;
  __syncthreads();
  unsigned lane = threadIdx.x % 32, from = lane + offset < 32 ? threadIdx.x + offset : threadIdx.x;
  unsigned long long got = exchange[from];
  __syncthreads();
  return got;
}
"""
MAIN = """
int main(int, char** argv) {
  gridDim.x = std::atoi(argv[1]);
  blockDim.x = std::atoi(argv[2]);
  std::vector<ulonglong2> page;
  for (ulonglong2 v; std::fread(&v, sizeof v, 1, stdin) == 1;) page.push_back(v);
  std::vector<pymux::Lanes> out(gridDim.x);
  for (unsigned b = 0; b < gridDim.x; ++b) {
    everyone = std::make_unique<std::barrier<>>(blockDim.x);
    std::vector<std::thread> threads;
    for (unsigned t = 0; t < blockDim.x; ++t)
      threads.emplace_back([&, b, t] {
        blockIdx.x = b;
        threadIdx.x = t;
        pymux_fingerprint(page.data(), page.size(), out.data());
      });
    for (auto& t : threads) t.join();
  }
  unsigned long long a = 0, b = 0;
  for (auto& o : out) a += o.a, b += o.b;
  std::printf("%llu %llu", a, b);
}
"""


def described(data):
    """The hash as fingerprint_hash.h describes it."""
    a = b = 0
    for i, (word,) in enumerate(struct.iter_unpack("<Q", data)):
        x = word ^ ((i + 1) * 0x9E3779B97F4A7C15 & MASK)
        x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 & MASK
        x = (x ^ (x >> 27)) * 0x94D049BB133111EB & MASK
        x ^= x >> 31
        a += x
        b += (x ^ (x >> 29)) * 0xD6E8FEB86659FD93 & MASK
    return a & MASK, b & MASK


@pytest.fixture(scope="module")
def kernel(tmp_path_factory):
    compiler = shutil.which(os.environ.get("CXX", "c++"))
    assert compiler, "the project needs a C++ compiler, and so does this test"
    home = tmp_path_factory.mktemp("kernel")
    source = home / "kernel.cpp"
    source.write_text(f'{SHIM}\n#define __CUDACC__ 1\n#include "{ROOT}/csrc/fingerprint.cu"\n{MAIN}')
    subprocess.run([compiler, "-std=c++20", "-O1", "-pthread", "-o", home / "kernel", source], check=True)

    def run(data):
        out = subprocess.run([home / "kernel", str(BLOCKS), str(THREADS)], input=data, capture_output=True, check=True)
        return tuple(map(int, out.stdout.split()))

    return run


@pytest.fixture
def device(cuda, vmm, tmp_path):
    """Runs the device's kernel over bytes put on the device."""
    module, function, host = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_void_p()
    image = b"any image will do for the simulator"
    if os.environ["PYMUX_DRIVER"] != "sim":
        fatbin = tmp_path / "kernel.fatbin"
        nvcc = shutil.which("nvcc") or pytest.skip("no nvcc")
        subprocess.run([nvcc, "-fatbin", "-arch=native", "-o", fatbin, ROOT / "csrc/fingerprint.cu"], check=True)
        image = fatbin.read_bytes()
    cuda.ok("cuModuleLoadData", byref(module), image)
    cuda.ok("cuModuleGetFunction", byref(function), module, b"pymux_fingerprint")
    cuda.ok("cuMemHostAlloc", byref(host), ctypes.c_size_t(16 * BLOCKS), 0)
    at = vmm.mapped()

    def run(data):
        vmm.write(at, data)
        page, pairs, out = ctypes.c_uint64(at), ctypes.c_uint64(len(data) // 16), ctypes.c_void_p(host.value)
        params = (ctypes.c_void_p * 3)(*(ctypes.cast(byref(p), ctypes.c_void_p) for p in (page, pairs, out)))
        cuda.ok("cuLaunchKernel", function, BLOCKS, 1, 1, THREADS, 1, 1, 0, None, params, None)
        cuda.ok("cuStreamSynchronize", None)
        sums = struct.unpack(f"<{2 * BLOCKS}Q", ctypes.string_at(host.value, 16 * BLOCKS))
        return sum(sums[::2]) & MASK, sum(sums[1::2]) & MASK

    yield run
    cuda.ok("cuMemFreeHost", host)
    cuda.ok("cuModuleUnload", module)


def pages():
    r = random.Random(1)
    yield bytes(4096)
    yield b"\xff" * 4096
    yield r.randbytes(4096)
    yield r.randbytes(10_000 * 16)


def test_the_kernels_source_the_device_and_the_description_agree(kernel, device):
    for data in pages():
        assert kernel(data) == device(data) == described(data)


def test_a_single_bit_or_two_swapped_words_change_both_lanes():
    data = bytearray(random.Random(2).randbytes(4096))
    base = described(data)
    for change in (lambda d: d.__setitem__(77, d[77] ^ 1), lambda d: d.__setitem__(slice(0, 16), d[8:16] + d[0:8])):
        other = bytearray(data)
        change(other)
        a, b = described(other)
        assert a != base[0]
        assert b != base[1]
