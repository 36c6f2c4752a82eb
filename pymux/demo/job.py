"""A process of a GRPO job of the demo: ``python -m pymux.demo.job CONFIG``.

The loop in train() is what a user writes; asynchronous.py has the one of two processes. Around it: the process says
"ready" on stdout, starts on a line on stdin, reports each step as a line of JSON, and writes what it measured.
"""

from __future__ import annotations

import hashlib
import json
import random
import sys
import time
from pathlib import Path
from typing import Any

import torch

import pymux
from pymux.demo import asynchronous, sandbox, tasks
from pymux.demo.config import Config
from pymux.demo.model import Shape, Transformer, generate, log_probabilities


def train(mux: pymux.Mux, config: Config) -> dict[str, Any]:
    """Run the job; returns its rewards and its final weights."""
    torch.manual_seed(config.seed)
    rng = random.Random(config.seed)
    sampling = torch.Generator().manual_seed(config.seed)
    kind = tasks.KINDS[config.kind % len(tasks.KINDS)]

    with mux.region("weights"):
        model = Transformer(Shape(vocabulary=len(tasks.ALPHABET))).to(mux.device)
    optimizer = mux.adopt(
        torch.optim.AdamW(model.parameters(), lr=config.learning_rate, betas=(0.9, 0.95)), region="optimizer"
    )
    with mux.region("kv_cache", on_evict="discard"):
        cache = model.new_cache(config.prompts * config.group)

    rewards = []
    for step in range(config.steps):
        batch = [kind(rng) for _ in range(config.prompts)]
        prompts = torch.tensor([tasks.encode(t.prompt) for t in batch]).repeat_interleave(config.group, 0)

        with mux.phase("rollout", uses=("weights", "kv_cache"), writes=("kv_cache",)):
            samples = generate(model, prompts.to(mux.device), cache, batch[0].length, sampling).cpu()

        answers = [tasks.decode(row[tasks.PROMPT_LENGTH :].tolist()) for row in samples]
        cases = [(batch[i // config.group].check, answer) for i, answer in enumerate(answers)]
        scores = torch.tensor(sandbox.score(cases, latency=config.latency))
        grouped = scores.view(config.prompts, config.group)
        spread = grouped.std(1, keepdim=True) + 1e-4
        advantages = ((grouped - grouped.mean(1, keepdim=True)) / spread).view(-1, 1)

        with mux.phase("train", uses=("weights", "optimizer")):
            log_p = log_probabilities(model, samples.to(mux.device), tasks.PROMPT_LENGTH)
            loss = -(advantages.to(mux.device) * log_p).mean()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()

        rewards.append(scores.mean().item())
        report(step + 1, rewards[-1])

    return {"rewards": rewards, "weights": torch.cat([mux.to_host(p).reshape(-1) for p in model.parameters()])}


def report(step: int, reward: float) -> None:
    """Say how far it is."""
    print(json.dumps({"step": step, "reward": reward}), flush=True)


def main() -> None:
    """Run the job described by the first argument."""
    torch.set_num_threads(1)  # one core computes, as one device does; and sums are always in one order
    # The same sums in the same order on a GPU too.
    torch.use_deterministic_algorithms(mode=True)
    torch.utils.deterministic.fill_uninitialized_memory = False
    torch.backends.cuda.enable_flash_sdp(enabled=False)
    torch.backends.cuda.enable_mem_efficient_sdp(enabled=False)
    config = Config(**json.loads(sys.argv[1]))
    torch.optim.AdamW([torch.zeros(1)])  # the first optimizer imports for a second: before the clock starts
    with pymux.connect(
        config.name, name="main" if config.role == "loop" else config.role, device=config.device, swap=config.swap
    ) as mux:
        print(json.dumps({"ready": True}), flush=True)
        sys.stdin.readline()
        started = time.monotonic()
        match config.role:
            case "sampler":
                outcome = asynchronous.sample(mux, config, asynchronous.connect_as_sampler(config))
            case "trainer":
                outcome = asynchronous.learn(mux, config, asynchronous.connect_as_trainer(config), report)
            case "loop":
                outcome = train(mux, config)
        finished = time.monotonic()
        weights = outcome["weights"]
        result = {
            "job": config.process,
            "started": started,
            "finished": finished,
            "rewards": outcome["rewards"],
            "weights": hashlib.sha256(weights.numpy().tobytes()).hexdigest() if len(weights) else "",
            "trace": mux.trace(),
            "stats": mux.stats(),
        }
    Path(config.result).write_text(json.dumps(result), encoding="utf-8")


if __name__ == "__main__":
    main()
