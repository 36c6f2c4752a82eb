"""What the link gives: each way and both at once, by the size of a piece, and by how host memory is aligned.

GB/s of copies between pinned host memory and a VMM allocation, submitted piece by piece and waited for at the end.
Across two processes: two_processes_overlap of bench_driver_facts.py.
"""

import ctypes
import statistics
import time

from common import Driver, arguments, node, publish, result, size_t, u64

MIB = 1 << 20
args = arguments(
    __doc__,
    mib={"type": int, "default": 256, "help": "bytes of a copy"},
    repeats={"type": int, "default": 3},
    pieces={"type": str, "default": "1,2,8,32,128", "help": "in MiB"},
)
nbytes = args.mib * MIB
SLACK = 2 * MIB

with node(PYMUX_SIM_CAPACITY=f"{2 * args.mib + 64}M", PYMUX_SIM_LINK="4e9"):
    driver = Driver()
    handles = [driver.create(nbytes) for _ in range(2)]
    ptrs = [driver.reserve(nbytes) for _ in range(2)]
    for ptr, handle in zip(ptrs, handles, strict=True):
        driver.map(ptr, handle, nbytes)
        driver.allow(ptr, nbytes)
    hosts = [driver.pinned(nbytes + SLACK) for _ in range(2)]
    for host in hosts:
        ctypes.memset(host, 1, nbytes + SLACK)
    streams = [driver.stream() for _ in range(2)]

    def submit(way: str, which: int, piece: int, shift: int = 0) -> None:
        for at in range(0, nbytes, piece):
            h, d = ctypes.c_void_p(hosts[which] + shift + at), u64(ptrs[which] + at)
            n = size_t(min(piece, nbytes - at))
            if way == "out":
                driver("cuMemcpyDtoHAsync_v2", h, d, n, streams[which])
            else:
                driver("cuMemcpyHtoDAsync_v2", d, h, n, streams[which])

    def rate(*ways: str, piece: int = 32 * MIB, shift: int = 0) -> float:
        times = []
        for _ in range(args.repeats):
            begin = time.perf_counter()
            for which, way in enumerate(ways):
                submit(way, which, piece, shift)
            for which, _ in enumerate(ways):
                driver("cuStreamSynchronize", streams[which])
            times.append(time.perf_counter() - begin)
        return len(ways) * nbytes / statistics.median(times) / 1e9

    rate("out", "in")  # all memory touched once
    results = [
        result("out", rate("out"), "GB/s"),
        result("in", rate("in"), "GB/s"),
        result("both_at_once", rate("out", "in"), "GB/s"),
    ]
    for mib in (int(p) for p in args.pieces.split(",")):
        results.append(result(f"out_piece_{mib}mib", rate("out", piece=mib * MIB), "GB/s"))
        results.append(result(f"in_piece_{mib}mib", rate("in", piece=mib * MIB), "GB/s"))
    for name, shift in (("64b", 64), ("4kib", 4096), ("64kib", 65536)):
        results.append(result(f"out_host_shifted_{name}", rate("out", shift=shift), "GB/s"))
        results.append(result(f"in_host_shifted_{name}", rate("in", shift=shift), "GB/s"))
    publish("copy", driver.device.name, results, args.json)
