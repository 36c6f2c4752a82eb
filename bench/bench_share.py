"""Handing new weights from a trainer to a sampler on the same device: shared, and copied.

Each turn the trainer writes all of the weights in a phase and publishes them; then the sampler opens a phase that
uses them. The handover is from the end of the writer's phase body to the beginning of the reader's: both leases, and
what the weights need. Copied means the cheapest copy there is, within the device to weights of the sampler's own,
and, for comparison, by way of pinned host memory, as processes do that cannot map each other's memory.
"""

import ctypes
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path

from common import ROOT, Driver, arguments, node, publish, result, size_t, u64

args = arguments(
    __doc__,
    mib={"type": int, "default": 256, "help": "size of the weights"},
    turns={"type": int, "default": 15},
    worker={"default": None, "help": "for the sampler"},
)
nbytes = args.mib << 20


def sampler(token: str) -> None:
    """Take a generation's number from stdin; answer with when the weights were there, and how long copies take."""
    import pymux

    driver = Driver()
    mux = pymux.connect("sampler")
    shared = mux.open_shared(token)
    with mux.phase("init"):
        own = mux.region("copy").allocate(nbytes)
        driver("cuMemsetD8_v2", u64(own.ptr), 1, size_t(nbytes))
    mux.evict()
    host, stream = driver.pinned(nbytes), driver.stream()
    ctypes.memset(host, 1, nbytes)
    print(json.dumps("ready"), flush=True)
    for line in sys.stdin:
        turn = json.loads(line)
        probe = ctypes.create_string_buffer(1)
        with mux.phase("rollout", uses=(shared.name,)):
            begin = time.monotonic()
            generation = shared.wait_published()
        seen = []
        with mux.phase("check"):
            for at in (0, nbytes // 2, nbytes - 1):
                driver("cuMemcpyDtoH_v2", probe, u64(shared.base + at), size_t(1))
                seen.append(probe.raw[0])
            times = []
            for call in ("device", "host"):
                t = time.monotonic()
                if call == "device":
                    driver("cuMemcpyDtoDAsync_v2", u64(own.ptr), u64(shared.base), size_t(nbytes), stream)
                else:
                    driver("cuMemcpyDtoHAsync_v2", ctypes.c_void_p(host), u64(shared.base), size_t(nbytes), stream)
                    driver("cuMemcpyHtoDAsync_v2", u64(own.ptr), ctypes.c_void_p(host), size_t(nbytes), stream)
                driver("cuStreamSynchronize", stream)
                times.append(time.monotonic() - t)
        wrong = generation != turn["generation"] or set(seen) != {turn["byte"]}
        figures = mux.stats()["regions"][shared.name]
        copied = figures["swapped_in_bytes"] + figures["swapped_out_bytes"]
        print(json.dumps({"begin": begin, "times": times, "wrong": wrong, "copied": copied}), flush=True)


def main() -> None:
    import pymux

    driver = Driver()
    mux = pymux.connect("trainer")
    region = mux.region("weights")
    with mux.phase("init"):
        block = region.allocate(nbytes)
        driver("cuMemsetD8_v2", u64(block.ptr), 0, size_t(nbytes))
    token = region.share()
    command = [sys.executable, str(Path(__file__).resolve()), "--mib", str(args.mib), "--worker", token]
    reader = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT)
    reader.stdout.readline()
    handovers, device, host, copied, wrong = [], [], [], 0, 0
    for turn in range(args.turns):
        with mux.phase("train"):
            driver("cuMemsetD8_v2", u64(block.ptr), turn + 1, size_t(nbytes))
            generation = region.publish()
            end = time.monotonic()
        reader.stdin.write(json.dumps({"generation": generation, "byte": turn + 1}) + "\n")
        reader.stdin.flush()
        answer = json.loads(reader.stdout.readline())
        handovers.append(answer["begin"] - end)
        device.append(answer["times"][0])
        host.append(answer["times"][1])
        wrong += answer["wrong"]
        copied = answer["copied"]
    reader.stdin.close()
    reader.wait(30)
    figures = mux.stats()["regions"]["weights"]
    copied += figures["swapped_in_bytes"] + figures["swapped_out_bytes"]
    later = statistics.median(handovers[1:])
    name = driver.device.name
    publish(
        "share",
        name,
        [
            result("share_bytes_copied", copied, "bytes", at_most=0),
            result("share_wrong_contents", wrong, "turns", at_most=0),
            result("share_vs_copy", later / statistics.median(device), "ratio", at_most=0.05),
            result("share_vs_host_copy", later / statistics.median(host), "ratio"),
            result("share_handover", later * 1e3, "ms"),
            result("share_first_handover", handovers[0] * 1e3, "ms"),
            result("copy_on_device", statistics.median(device) * 1e3, "ms"),
            result("copy_by_host", statistics.median(host) * 1e3, "ms"),
        ],
        args.json,
    )


if args.worker:
    sampler(args.worker)
else:
    with node(PYMUX_SIM_CAPACITY=f"{args.mib * 3}M"):
        main()
