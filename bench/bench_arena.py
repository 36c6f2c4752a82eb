"""The allocator that replaces torch's: time of an allocation and a free, and what fragmentation costs.

- pairs: sizes of a small transformer's training step, each freed before the next; all served from the cache.
- sweep: a million allocations on one stream, of these sizes in random order and with random lifetimes; and the same
  with any size from 512 bytes to 4 MiB, evenly by their logarithm. Held is what the region has of the device when the
  sweep ends, reserved what remains of it when somebody else wants all that has no block in it: pages without blocks
  are given away without a copy. The worst of some seeds.

Goes through the functions that torch calls, from a loop in C++ that g++ builds.
"""

import ctypes
import statistics
import subprocess
import tempfile
from pathlib import Path

from common import arguments, node, publish, result

args = arguments(
    __doc__,
    steps={"type": int, "default": 1_000_000},
    most_mib={"type": int, "default": 192, "help": "bytes in use at most"},
    seeds={"type": int, "nargs": "+", "default": [1, 2, 3]},
)
MIB = 1 << 20
WIDTH, TOKENS, HEADS = 512, 1024, 8
# Activations and gradients, in bytes of float32: scalars, norms, biases, projections, heads, attention, the MLP.
SIZES = [4 * n for n in (1, WIDTH, TOKENS, 4 * WIDTH, WIDTH * WIDTH, 3 * WIDTH * WIDTH, TOKENS * WIDTH // HEADS,
                         TOKENS * WIDTH, 2 * TOKENS * WIDTH, TOKENS * HEADS)]  # fmt: skip


def loops(directory: str) -> ctypes.CDLL:
    """Build and load arena_loop.cpp."""
    source, out = Path(__file__).with_name("arena_loop.cpp"), f"{directory}/loop.so"
    subprocess.run(["g++", "-O2", "-std=c++20", "-shared", "-fPIC", "-o", out, source], check=True)
    return ctypes.CDLL(out)


def main() -> None:
    results = []
    with tempfile.TemporaryDirectory() as directory, node(PYMUX_SIM_CAPACITY="512M"):
        import pymux
        from pymux import _core

        loop = loops(directory)
        core = ctypes.CDLL(_core.__file__)
        calls = core.pymux_torch_allocate, core.pymux_torch_free
        sizes = (ctypes.c_int64 * len(SIZES))(*SIZES)
        with pymux.connect("pairs") as mux:
            region = mux.region("default")
            _core.torch_install(region.agent, region.core)
            out = (ctypes.c_double * 20_000)()
            with mux.phase("pairs"):
                loop.pairs(*calls, sizes, ctypes.c_size_t(len(sizes)), out, ctypes.c_size_t(len(out)))
            results += [
                result("arena_p50_ns", statistics.median(out), "ns", at_most=250),
                result("arena_p99_ns", statistics.quantiles(out, n=100)[-1], "ns"),
                result("sweep_allocations", args.steps, ""),
            ]
        for name, n in (("fragmentation", len(sizes)), ("fragmentation_any_size", 0)):
            figures = []
            for seed in args.seeds:
                with pymux.connect(f"{name}-{seed}") as mux:
                    region = mux.region("default")
                    _core.torch_install(region.agent, region.core)
                    used = ctypes.c_uint64()
                    with mux.phase("sweep"):
                        loop.sweep(
                            *calls, sizes, ctypes.c_size_t(n), ctypes.c_size_t(args.steps),
                            ctypes.c_size_t(args.most_mib * MIB), seed, ctypes.byref(used),
                        )  # fmt: skip
                    told = _core.torch_stats(region.core)
                    held = mux.stats()["regions"]["default"]["resident_bytes"]  # nothing is given back meanwhile
                    _core.torch_empty_cache()  # as the end of a phase does when somebody waits
                    mux.evict()
                    reserved = mux.stats()["regions"]["default"]["evicted_bytes"]
                hits = told["hits"] / told["allocations"]
                figures.append((held / used.value, hits, reserved / used.value))
            held, hits, reserved = zip(*figures, strict=True)
            results += [
                result(f"{name}_held", max(held), ""),
                result(f"{name}_hits", min(hits), "of allocations"),
                result(name, max(reserved), "", at_most=1.25),
            ]
    publish("arena", "simulated", results, args.json)


if __name__ == "__main__":
    main()
