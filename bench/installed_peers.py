"""Swap tensors by torch_memory_saver's or vLLM's own allocator, where it is installed; bench_swap.py calls it.

Each library takes torch's allocations over, so each gets a process: `installed_peers.py NAME BYTES REPEATS`. Prints
JSON: median bytes per second [out, in] after a first turn that is left out, or null without it or a GPU.
"""

import importlib.util
import json
import statistics
import sys
import time
from collections.abc import Callable

COUNT = 48  # allocations, as in bench_swap.py


def memory_saver() -> tuple[Callable, Callable, Callable]:
    """The saver with host copies, hooked into torch's allocator: pool, pause, resume."""
    from torch_memory_saver import torch_memory_saver as saver

    saver.hook_mode = "torch"
    return lambda: saver.region(tag="weights", enable_cpu_backup=True), saver.pause, saver.resume


def sleep_mode() -> tuple[Callable, Callable, Callable]:
    """The allocator of vLLM behind sleep level 1: pool, sleep, wake up."""
    from vllm.device_allocator.cumem import CuMemAllocator

    allocator = CuMemAllocator.get_instance()
    return lambda: allocator.use_memory_pool(tag="weights"), lambda: allocator.sleep("weights"), allocator.wake_up


LIBRARIES = {"torch_memory_saver": memory_saver, "vllm": sleep_mode}


def measure(name: str, nbytes: int, repeats: int) -> list[float] | None:
    """Median bytes per second out and in; None where the library or torch's GPU is missing.

    Raises:
        RuntimeError: contents came back changed.
    """
    if importlib.util.find_spec("torch") is None or importlib.util.find_spec(name) is None:
        return None
    import torch

    if not torch.cuda.is_available():
        return None

    def timed(f: Callable) -> float:
        torch.cuda.synchronize()
        begin = time.perf_counter()
        f()
        torch.cuda.synchronize()
        return time.perf_counter() - begin

    pool, out, back = LIBRARIES[name]()
    with pool():
        tensors = [torch.full((nbytes // COUNT,), i, dtype=torch.uint8, device="cuda") for i in range(COUNT)]
    times = [(timed(out), timed(back)) for _ in range(repeats + 1)][1:]
    if any(int(t[0]) != i or int(t[-1]) != i for i, t in enumerate(tensors)):
        raise RuntimeError(f"{name} brought other contents back")
    return [sum(t.nbytes for t in tensors) / statistics.median(t) for t in zip(*times, strict=True)]


if __name__ == "__main__":
    print(json.dumps(measure(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))))
