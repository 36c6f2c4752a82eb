"""A torch training step with pymux's allocator against one with torch's own. Needs a CUDA build of torch and a GPU.

A transformer block's shapes in bfloat16: forward, backward, AdamW. Each allocator has processes of its own, by turns;
the figure is the ratio of the medians.
"""

import importlib.util
import json
import statistics
import subprocess
import sys
import time

from common import ROOT, Driver, arguments, node, publish, result

args = arguments(
    __doc__,
    steps={"type": int, "default": 60},
    rounds={"type": int, "default": 3},
    worker={"default": None, "help": "for the processes of the bench itself"},
)


def worker(kind: str) -> None:
    """Print the median seconds of a step."""
    import contextlib

    import torch

    phase = contextlib.nullcontext()
    if kind == "pymux":
        import pymux.torch

        phase = pymux.torch.install().mux.phase("train")
    with phase:
        torch.manual_seed(0)
        layer = torch.nn.TransformerEncoderLayer(2048, 16, 8192, batch_first=True, dtype=torch.bfloat16)
        model = torch.nn.TransformerEncoder(layer, 8).cuda()
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        times = []
        for step in range(args.steps + 10):
            # Lengths vary, as prompts do: blocks of one size are not all there is.
            x = torch.randn(8, 256 + 32 * (step % 7), 2048, device="cuda", dtype=torch.bfloat16)
            torch.cuda.synchronize()
            begin = time.perf_counter()
            model(x).float().square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            torch.cuda.synchronize()
            times.append(time.perf_counter() - begin)
    print(json.dumps(statistics.median(times[10:])), flush=True)


def has_gpu() -> bool:
    if importlib.util.find_spec("torch") is None:
        return False
    import torch

    return torch.cuda.is_available()


def main() -> None:
    if not has_gpu():
        print("allocator_step_ratio: not run (needs a CUDA build of torch and a GPU)")
        return
    times: dict[str, list[float]] = {"torch": [], "pymux": []}
    for _ in range(args.rounds):
        for kind, seen in times.items():
            command = [sys.executable, __file__, "--steps", str(args.steps), "--worker", kind]
            done = subprocess.run(command, stdout=subprocess.PIPE, text=True, cwd=ROOT, check=True)
            seen.append(json.loads(done.stdout.splitlines()[-1]))
    own, ours = (statistics.median(t) for t in times.values())
    publish(
        "step",
        Driver().device.name,
        [
            result("allocator_step_ratio", ours / own, "ratio", at_most=1.01),
            result("step_torch", own * 1e3, "ms"),
            result("step_pymux", ours * 1e3, "ms"),
        ],
        args.json,
    )


if args.worker:
    worker(args.worker)
else:
    with node():
        main()
