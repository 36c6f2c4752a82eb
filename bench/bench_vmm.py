"""What virtual memory calls cost by page size: fresh memory against passed memory.

Fresh: create, map, set access, unmap, release. Passed: export, import, map, set access, unmap, as a
handoff does. Medians, in microseconds a call; and milliseconds for a GiB of pages.
"""

import os
import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

from common import Driver, arguments, node, publish, result

MIB = 1 << 20
args = arguments(__doc__, repeats={"type": int, "default": 12}, sizes={"type": str, "default": "2,8,32,64"})

with node(PYMUX_SIM_CAPACITY="512M"):
    driver = Driver()
    results = []
    for mib in (int(s) for s in args.sizes.split(",")):
        size = mib * MIB
        times: dict[str, list[float]] = defaultdict(list)

        def timed(name: str, f: Callable[..., Any], *a: Any, into: dict[str, list[float]] = times) -> Any:
            begin = time.perf_counter()
            value = f(*a)
            into[name].append(time.perf_counter() - begin)
            return value

        ptr = driver.reserve(size)
        for _ in range(args.repeats):
            handle = timed("create", driver.create, size)
            timed("map", driver.map, ptr, handle, size)
            timed("set_access", driver.allow, ptr, size)
            timed("unmap", driver.unmap, ptr, size)
            fd = timed("export", driver.export, handle)
            timed("release_shared", driver.release, handle)
            handle = timed("import", driver.import_, fd)
            os.close(fd)
            driver.map(ptr, handle, size)
            driver.allow(ptr, size)
            driver.unmap(ptr, size)
            timed("release_last", driver.release, handle)
        driver.free_address(ptr, size)
        median = {k: statistics.median(v) for k, v in times.items()}
        results += [result(f"{k}_{mib}mib", 1e6 * v, "us") for k, v in median.items()]
        moves = median["map"] + median["set_access"] + median["unmap"]
        fresh = median["create"] + median["release_last"] + moves
        passed = median["export"] + median["import"] + median["release_shared"] + moves
        results.append(result(f"fresh_{mib}mib", 1e3 * fresh * 1024 / mib, "ms/GiB"))
        results.append(result(f"passed_{mib}mib", 1e3 * passed * 1024 / mib, "ms/GiB"))
    publish("vmm", driver.device.name, results, args.json)
