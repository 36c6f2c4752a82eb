"""Swap-out and swap-in of one region against a raw pinned copy loop of the same bytes.

The raw loop is what the hardware gives: one stream, pinned memory, chunks of a page, wait at the
end; through the same driver, in the same run.
"""

import ctypes
import statistics
import time

from common import Driver, arguments, node, publish, result, size_t, u64

args = arguments(
    __doc__,
    mib={"type": int, "default": 512, "help": "size of the region"},
    repeats={"type": int, "default": 5},
)
nbytes = args.mib << 20


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


with node(PYMUX_SIM_CAPACITY=f"{args.mib + 64}M", PYMUX_SIM_LINK="4e9"):
    import pymux

    driver = Driver()
    with pymux.connect("swap") as mux:
        raw_out, raw_in = raw(driver, mux.stats()["page_size"])
        region = mux.region("weights")
        with mux.phase("load"):
            block = region.allocate(nbytes)
            driver("cuMemsetD8_v2", u64(block.ptr), 1, size_t(nbytes))

        def out() -> float:
            begin = time.perf_counter()
            mux.evict()
            return time.perf_counter() - begin

        def back() -> float:
            begin = time.perf_counter()
            with mux.phase("use"):  # writes everything: the next swap-out copies all of it
                return time.perf_counter() - begin

        first = out()
        first_in = back()
        outs, ins = [], []
        for _ in range(args.repeats):
            outs.append(out())
            ins.append(back())
    swap_out, swap_in = statistics.median(outs), statistics.median(ins)
    gb = nbytes / 1e9
    publish(
        "swap",
        driver.device.name,
        [
            result("region_mib", args.mib, "MiB"),
            result("raw_out", gb / raw_out, "GB/s"),
            result("raw_in", gb / raw_in, "GB/s"),
            result("swap_out", gb / swap_out, "GB/s"),
            result("swap_in", gb / swap_in, "GB/s"),
            result("swap_out_vs_raw", raw_out / swap_out, "ratio", at_least=0.90),
            result("swap_in_vs_raw", raw_in / swap_in, "ratio", at_least=0.90),
            result("first_vs_second", swap_out / first, "ratio"),
            result("first_in", first_in, "s"),
        ],
        args.json,
    )
