"""What pinning host memory costs: allocated by the driver, or registered, with and without pages faulted in first.

GB/s of pinning fresh memory. Faulted: MADV_POPULATE_WRITE before it is registered; hugepages: as far as the system
grants them, wished for on private memory and on a memfd, which the backing store is.
"""

import ctypes
import mmap
import os
import statistics
import time

from common import Driver, arguments, node, publish, result, size_t

args = arguments(__doc__, mib={"type": int, "default": 256}, repeats={"type": int, "default": 3})
nbytes = args.mib << 20
POPULATE_WRITE, HUGEPAGE = 23, 14  # MADV_*

with node(PYMUX_SIM_CAPACITY="64M"):
    driver = Driver()
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]

    def allocated() -> float:
        begin = time.perf_counter()
        p = driver.pinned(nbytes)
        seconds = time.perf_counter() - begin
        driver("cuMemFreeHost", ctypes.c_void_p(p))
        return seconds

    def registered(*advice: int, file: bool = False) -> float:
        fd = os.memfd_create("bench") if file else -1
        if file:
            os.ftruncate(fd, nbytes)
        flags = mmap.MAP_SHARED if file else mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        p = ctypes.c_void_p(libc.mmap(None, nbytes, mmap.PROT_READ | mmap.PROT_WRITE, flags, fd, 0))
        begin = time.perf_counter()
        for a in advice:
            libc.madvise(p, size_t(nbytes), a)
        driver("cuMemHostRegister_v2", p, size_t(nbytes), 0)
        seconds = time.perf_counter() - begin
        driver("cuMemHostUnregister", p)
        libc.munmap(p, size_t(nbytes))
        if file:
            os.close(fd)
        return seconds

    ways = {
        "allocate": allocated,
        "register": registered,
        "populate_register": lambda: registered(POPULATE_WRITE),
        "hugepages_populate_register": lambda: registered(HUGEPAGE, POPULATE_WRITE),
        "memfd_populate_register": lambda: registered(POPULATE_WRITE, file=True),
        "memfd_hugepages_populate_register": lambda: registered(HUGEPAGE, POPULATE_WRITE, file=True),
    }
    results = [
        result(f"pin_{name}", nbytes / statistics.median(way() for _ in range(args.repeats)) / 1e9, "GB/s")
        for name, way in ways.items()
    ]
    publish("pin", driver.device.name, results, args.json)
