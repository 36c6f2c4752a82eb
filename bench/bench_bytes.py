"""Two processes that need 60 % of the device each hand it over in turns, and look at every byte.

Each writes a number of its own into each page in every phase, and in the next one reads all pages back: bytes that
were lost, torn or another page's show. The handover is from the end of one's phase body to the beginning of the
other's.
"""

import ctypes
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path

from common import ROOT, Driver, arguments, byref, node, publish, result, size_t, u64

args = arguments(
    __doc__,
    share={"type": float, "default": 0.6, "help": "of the device, that each process needs"},
    turns={"type": int, "default": 3},
    worker={"default": None, "help": "for the processes of the bench itself"},
)
BUFFER = 64 << 20  # of pinned memory, to read back through


def worker(name: str, nbytes: int) -> None:
    """Run a phase for each line of stdin; answer with when it was, and how many pages were wrong."""
    import pymux

    driver = Driver()
    libc = ctypes.CDLL(None)
    host, stream = driver.pinned(BUFFER), driver.stream()
    mux = pymux.connect(name)
    page = mux.stats()["page_size"]
    pages = nbytes // page
    seed = 1 if name == "a" else 1 << 16
    with mux.phase("init"):
        block = mux.region("all").allocate(pages * page)

    def number(index: int, turn: int) -> int:
        return (seed * (turn + 1) * 2654435761 + index * 40503) & 0xFFFFFFFF

    def wrong(index: int, turn: int) -> bool:
        expected = number(index, turn)
        for at in range(0, page, BUFFER):
            n = min(BUFFER, page - at)
            driver("cuMemcpyDtoHAsync_v2", ctypes.c_void_p(host), u64(block.ptr + index * page + at), size_t(n), stream)
            driver("cuStreamSynchronize", stream)
            first = ctypes.c_uint32.from_address(host).value
            # Every word equals the one before it.
            if first != expected or libc.memcmp(ctypes.c_void_p(host), ctypes.c_void_p(host + 4), size_t(n - 4)):
                return True
        return False

    print(json.dumps("ready"), flush=True)
    for turn, _ in enumerate(sys.stdin):
        with mux.phase("turn"):
            begin = time.monotonic()
            bad = sum(wrong(i, turn - 1) for i in range(pages)) if turn else 0
            for i in range(pages):
                word = ctypes.c_uint32(number(i, turn))
                driver("cuMemsetD32Async", u64(block.ptr + i * page), word, size_t(page // 4), stream)
            driver("cuStreamSynchronize", stream)
            end = time.monotonic()
        s = mux.stats()["regions"]["all"]
        moved = s["swapped_out_bytes"] + s["swapped_in_bytes"]
        print(json.dumps({"begin": begin, "end": end, "wrong": bad, "moved": moved}), flush=True)


def main() -> None:
    driver = Driver()
    free, total = size_t(), size_t()
    driver("cuMemGetInfo_v2", byref(free), byref(total))
    nbytes = int(total.value * args.share)
    jobs = []
    for name in "ab":
        command = [sys.executable, str(Path(__file__).resolve()), "--worker", json.dumps([name, nbytes])]
        jobs.append(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT))
        jobs[-1].stdout.readline()
    handovers, wrong, moved, last = [], 0, [0, 0], None
    for turn in range(args.turns * 2):
        job = jobs[turn % 2]
        job.stdin.write("go\n")
        job.stdin.flush()
        answer = json.loads(job.stdout.readline())
        if last is not None:
            handovers.append(answer["begin"] - last)
        last = answer["end"]
        wrong += answer["wrong"]
        moved[turn % 2] = answer["moved"]
    for job in jobs:
        job.stdin.close()
        job.wait(60)
    publish(
        "bytes",
        driver.device.name,
        [
            result("wrong_pages", wrong, "pages", at_most=0),
            result("bytes_each", nbytes / 2**30, "GiB"),
            result("moved_per_turn", sum(moved) / (args.turns * 2) / 2**30, "GiB"),
            result("handover", statistics.median(handovers), "s"),
        ],
        args.json,
    )


if args.worker:
    worker(*json.loads(args.worker))
else:
    with node(PYMUX_SIM_CAPACITY="256M"):
        main()
