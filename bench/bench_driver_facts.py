"""What the design takes for granted about the driver, asked: 1 is yes, 0 is no.

- Does exported memory stay alive, contents included, while only a descriptor in a process without a
  CUDA context refers to it?
- Do a swap-out in one process and a swap-in in another overlap? (2: fully, 1: not at all)
- Does a captured CUDA graph replay after the pages of its tensors were exchanged? (needs a GPU)
"""

import ctypes
import os
import socket
import subprocess
import sys
import time

from common import Driver, arguments, byref, node, publish, result, size_t, u64

args = arguments(__doc__, role={"default": ""}, mib={"type": int, "default": 128})
nbytes = args.mib << 20


# A process without CUDA: takes a descriptor, and gives it back when told.
KEEPER = """
import socket, sys
s = socket.socket(fileno=int(sys.argv[1]))
_, fds, _, _ = socket.recv_fds(s, 1, 1)
s.send(b"k")
s.recv(1)
socket.send_fds(s, [b"b"], fds)
s.recv(1)
"""


def mapped(driver: Driver, handle: int, size: int) -> int:
    ptr = driver.reserve(size)
    driver.map(ptr, handle, size)
    driver.allow(ptr, size)
    return ptr


def survives_in_a_descriptor(driver: Driver) -> bool:
    """Leave memory to a descriptor in a plain process, and look again."""
    size = driver.device.granularity
    pattern = bytes(range(256)) * (size // 256)
    handle = driver.create(size)
    ptr = mapped(driver, handle, size)
    driver("cuMemcpyHtoD_v2", u64(ptr), pattern, size_t(size))
    fd = driver.export(handle)
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    keeper = subprocess.Popen(
        [
            sys.executable,
            "-c",
            KEEPER,
            str(theirs.fileno()),
        ],
        pass_fds=[theirs.fileno()],
    )
    theirs.close()
    socket.send_fds(ours, [b"f"], [fd])
    os.close(fd)
    ours.recv(1)
    driver.unmap(ptr, size)
    driver.release(handle)
    driver.free_address(ptr, size)
    # Other memory comes and goes meanwhile, zeroed by the driver: it must not be ours.
    for _ in range(8):
        driver.release(driver.create(size))
    time.sleep(0.2)
    ours.send(b"g")
    _, fds, _, _ = socket.recv_fds(ours, 1, 1)
    ours.send(b"q")
    keeper.wait()
    ours.close()
    handle = driver.import_(fds[0])
    os.close(fds[0])
    ptr = mapped(driver, handle, size)
    back = ctypes.create_string_buffer(size)
    driver("cuMemcpyDtoH_v2", back, u64(ptr), size_t(size))
    driver.unmap(ptr, size)
    driver.release(handle)
    driver.free_address(ptr, size)
    return back.raw == pattern


def copy_when_told(direction: str) -> None:
    """Child: copy one way on each line of stdin, and say how long it took."""
    driver = Driver()
    handle = driver.create(nbytes)
    ptr, host, stream = mapped(driver, handle, nbytes), driver.pinned(nbytes), driver.stream()

    def copy() -> float:
        begin = time.perf_counter()
        h, d = ctypes.c_void_p(host), u64(ptr)
        if direction == "out":
            driver("cuMemcpyDtoHAsync_v2", h, d, size_t(nbytes), stream)
        else:
            driver("cuMemcpyHtoDAsync_v2", d, h, size_t(nbytes), stream)
        driver("cuStreamSynchronize", stream)
        return time.perf_counter() - begin

    copy()
    print("ready", flush=True)
    for _ in sys.stdin:
        print(copy(), flush=True)


def overlap() -> float:
    """Time both directions, in two processes, apart and together."""
    children = {
        d: subprocess.Popen(
            [sys.executable, __file__, "--role", d, "--mib", str(args.mib)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for d in ("out", "in")
    }
    for c in children.values():
        c.stdout.readline()

    def go(*which: str) -> list[float]:
        for d in which:
            children[d].stdin.write("go\n")
            children[d].stdin.flush()
        return [float(children[d].stdout.readline()) for d in which]

    best = []
    for _ in range(5):
        alone = go("out")[0] + go("in")[0]
        best.append(alone / max(go("out", "in")))
    for c in children.values():
        c.stdin.close()
        c.wait()
    return sorted(best)[len(best) // 2]


def graph_replays() -> bool | None:
    """Capture a graph over a region, evict the region, bring it back, replay."""
    try:
        import torch
    except ImportError:
        return None
    if not torch.cuda.is_available():
        return None
    import pymux

    with pymux.connect("graph") as mux:
        with mux.region("weights"):
            x, y = torch.ones(1 << 20, device=mux.device), torch.zeros(1 << 20, device=mux.device)
        with mux.phase("capture"):
            y.copy_(x * 2)
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                y.copy_(x * 2 + y)
        mux.evict()
        with mux.phase("replay"):
            y.zero_()
            graph.replay()
            torch.cuda.synchronize()
            return bool((y == 2).all())


if args.role:
    copy_when_told(args.role)
    sys.exit()

with node(PYMUX_SIM_CAPACITY="512M", PYMUX_SIM_LINK="2e9"):
    driver = Driver()
    free, total = size_t(), size_t()
    driver("cuMemGetInfo_v2", byref(free), byref(total))
    results = [
        result("memory_survives_in_a_descriptor", int(survives_in_a_descriptor(driver)), "yes/no", at_least=1),
        result("two_processes_overlap", overlap(), "ratio", at_least=1.5),
    ]
    replays = graph_replays()
    if replays is None:
        print("graph_replays_after_a_swap: not run (needs torch and a GPU)")
    else:
        results.append(result("graph_replays_after_a_swap", int(replays), "yes/no", at_least=1))
    publish("driver_facts", driver.device.name, results, args.json)
