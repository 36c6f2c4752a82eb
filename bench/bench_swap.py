"""Swap-out and swap-in of one region against a raw pinned copy loop, and against the peers' strategies.

The raw loop is what the hardware gives: one stream, pinned memory, chunks of a page, wait at the
end; through the same driver, in the same run. The strategies move the same bytes in allocations
of an odd size, one after the other and synchronously:

- pause: pin, copy, unmap and free each allocation; back: create, map, copy, unpin each
- sleep: the same with pinned blocks that are kept, rounded up to a power of two
- snapshot: everything at once into memory pinned for it, as a whole-process checkpoint

Where torch has a GPU, torch_memory_saver and vLLM's allocator are measured as well if they are installed.
"""

import ctypes
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path

from common import Driver, arguments, node, publish, result, size_t, u64

args = arguments(
    __doc__,
    mib={"type": int, "default": 1024, "help": "size of the region"},
    repeats={"type": int, "default": 5},
    peer_repeats={"type": int, "default": 3},
)
nbytes = args.mib << 20
ALLOCATIONS = 48  # of 1 GiB / 48, rounded to 2 MiB: no power of two


def raw(driver: Driver, chunk: int) -> tuple[float, float]:
    """Median seconds (out, in) of a plain copy loop."""
    handle, ptr = driver.create(nbytes), driver.reserve(nbytes)
    driver.map(ptr, handle, nbytes)
    driver.allow(ptr, nbytes)
    host, stream = driver.pinned(nbytes), driver.stream()

    def copy(call: str, *, to_host: bool) -> float:
        begin = time.perf_counter()
        for at in range(0, nbytes, chunk):
            h, d = ctypes.c_void_p(host + at), u64(ptr + at)
            driver(call, *((h, d) if to_host else (d, h)), size_t(chunk), stream)
        driver("cuStreamSynchronize", stream)
        return time.perf_counter() - begin

    copy("cuMemcpyDtoHAsync_v2", to_host=True)  # both memories touched once
    out = [copy("cuMemcpyDtoHAsync_v2", to_host=True) for _ in range(args.repeats)]
    back = [copy("cuMemcpyHtoDAsync_v2", to_host=False) for _ in range(args.repeats)]
    driver.unmap(ptr, nbytes)
    driver.release(handle)
    driver.free_address(ptr, nbytes)
    driver("cuMemFreeHost", ctypes.c_void_p(host))
    return statistics.median(out), statistics.median(back)


class Peer:
    """Moves allocations as the peers do.

    Args:
        driver: the CUDA driver.
        size: bytes of each allocation.
        count: of allocations.
        keep: keep pinned blocks from swap to swap.
        whole: one pinned block for everything.
    """

    def __init__(self, driver: Driver, size: int, count: int, *, keep: bool, whole: bool) -> None:
        self.driver, self.size, self.keep = driver, size, keep
        self.block = size * count if whole else 1 << (size - 1).bit_length() if keep else size
        self.per_block = count if whole else 1
        self.addresses = [driver.reserve(size) for _ in range(count)]
        self.handles = [self._map(at) for at in self.addresses]
        self.blocks: list[int] = []
        self.pinned_bytes = 0

    def _map(self, at: int) -> int:
        handle = self.driver.create(self.size, exportable=False)
        self.driver.map(at, handle, self.size)
        self.driver.allow(at, self.size)
        return handle

    def _host(self, i: int) -> ctypes.c_void_p:
        return ctypes.c_void_p(self.blocks[i // self.per_block] + i % self.per_block * self.size)

    def out(self) -> None:
        for i, at in enumerate(self.addresses):
            if i // self.per_block == len(self.blocks):
                self.blocks.append(self.driver.pinned(self.block))
            self.driver("cuMemcpyDtoH_v2", self._host(i), u64(at), size_t(self.size))
            self.driver.unmap(at, self.size)
            self.driver.release(self.handles[i])
        self.pinned_bytes = len(self.blocks) * self.block

    def back(self) -> None:
        for i, at in enumerate(self.addresses):
            self.handles[i] = self._map(at)
            self.driver("cuMemcpyHtoD_v2", u64(at), self._host(i), size_t(self.size))
        if not self.keep:
            self.unpin()

    def unpin(self) -> None:
        for block in self.blocks:
            self.driver("cuMemFreeHost", ctypes.c_void_p(block))
        self.blocks.clear()

    def close(self) -> None:
        self.unpin()
        for at, handle in zip(self.addresses, self.handles, strict=True):
            self.driver.unmap(at, self.size)
            self.driver.release(handle)
            self.driver.free_address(at, self.size)


def timed(f: object) -> float:
    begin = time.perf_counter()
    f()
    return time.perf_counter() - begin


def peer(driver: Driver, **kind: bool) -> tuple[float, float, float]:
    """Median bytes per second out and in (the first turn left out where blocks are kept), and host bytes."""
    size = -(-nbytes // ALLOCATIONS // (2 << 20)) * (2 << 20)
    p = Peer(driver, size, nbytes // size, **kind)
    times = [(timed(p.out), timed(p.back)) for _ in range(args.peer_repeats + kind["keep"])][kind["keep"] :]
    p.close()
    moved = size * (nbytes // size)
    out, back = (moved / statistics.median(t) for t in zip(*times, strict=True))
    return out, back, p.pinned_bytes / moved


def installed(library: str) -> tuple[float, float] | None:
    """Median bytes per second out and in of the library itself; None where it or a GPU is missing, or it fails."""
    script = Path(__file__).with_name("installed_peers.py")
    command = [sys.executable, str(script), library, str(nbytes), str(args.peer_repeats)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        print(f"{library} failed:\n{done.stderr}", file=sys.stderr)
        return None
    return json.loads(done.stdout.splitlines()[-1])


with node(PYMUX_SIM_CAPACITY=f"{args.mib + 64}M", PYMUX_SIM_LINK="4e9"):
    import pymux

    def swap_out() -> float:
        return timed(mux.evict)

    def swap_in() -> float:
        begin = time.perf_counter()
        with mux.phase("use"):  # writes everything: the next swap-out copies all of it
            return time.perf_counter() - begin

    def load() -> object:
        with mux.phase("load"):
            block = mux.region("weights").allocate(nbytes)
            driver("cuMemsetD8_v2", u64(block.ptr), 1, size_t(nbytes))
        return block

    driver = Driver()
    with pymux.connect("cold") as mux:  # nobody shares the device: host memory is pinned by the first swap itself
        raw_out, raw_in = raw(driver, mux.stats()["page_size"])
        block = load()
        cold = swap_out()
    del block
    with pymux.connect("neighbour"), pymux.connect("swap") as mux:
        block = load()
        begin = time.perf_counter()
        while mux.stats()["host_pinned_bytes"] < nbytes:  # the first phase goes on computing
            time.sleep(0.01)
        growing = time.perf_counter() - begin
        first, first_in = swap_out(), swap_in()
        outs, ins = zip(*((swap_out(), swap_in()) for _ in range(args.repeats)), strict=True)
        host = mux.stats()["host_pinned_bytes"] / nbytes
    del block
    kinds = {
        "pause": {"keep": False, "whole": False},
        "sleep": {"keep": True, "whole": False},
        "snapshot": {"keep": False, "whole": True},
    }
    peers = {name: peer(driver, **kind) for name, kind in kinds.items()}
    libraries = {name: installed(name) for name in ("torch_memory_saver", "vllm")}

out, back = statistics.median(outs), statistics.median(ins)
gb = nbytes / 1e9
results = [
    result("region_mib", args.mib, "MiB"),
    result("raw_out", gb / raw_out, "GB/s"),
    result("raw_in", gb / raw_in, "GB/s"),
    result("swap_out", gb / out, "GB/s"),
    result("swap_in", gb / back, "GB/s"),
    result("swap_out_vs_raw", raw_out / out, "ratio", at_least=0.90),
    result("swap_in_vs_raw", raw_in / back, "ratio", at_least=0.90),
    result("first_vs_second", out / first, "ratio", at_least=0.5),
    result("cold_first_vs_second", out / cold, "ratio"),
    result("grown_after", growing, "s"),
    result("first_in", first_in, "s"),
    result("host_bytes_per_byte", host, "ratio"),
]
for name, (peer_out, peer_in, *peer_host) in {**peers, **{n: f for n, f in libraries.items() if f}}.items():
    results += [
        result(f"{name}_out", peer_out / 1e9, "GB/s"),
        result(f"{name}_in", peer_in / 1e9, "GB/s"),
        *(result(f"{name}_host_bytes_per_byte", ratio, "ratio") for ratio in peer_host),
        result(f"out_and_in_vs_{name}", (1 / peer_out + 1 / peer_in) * nbytes / (out + back), "x faster"),
    ]
publish("swap", driver.device.name, results, args.json)
