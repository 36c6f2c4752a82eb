"""An asynchronous GRPO job: a sampler and a trainer, each a process of the job, with bounded staleness.

Batch k is sampled with the weights of step k - staleness, no newer and no older: what is learnt depends on the
staleness and on nothing else. The sampler scores each half of a batch as soon as it is sampled; the trainer
takes the halves as they come. What they wait for inside a phase they wait for in `Lease.idle`.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from functools import partial
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from typing import Any

import torch

import pymux
from pymux.demo import sandbox, tasks
from pymux.demo.config import Config
from pymux.demo.model import Shape, Transformer, generate, log_probabilities

HALVES = 2
_PATIENCE = 60.0  # seconds for the other process to be there


class Waits:
    """How long waits of one kind take, for `Lease.idle`: the mean of the latest ones."""

    def __init__(self) -> None:
        self.expect = 0.0

    def __call__(self, lease: pymux.Lease, wait: Callable[[], Any]) -> Any:
        """Wait with the device lent out."""
        with lease.idle(expect=self.expect):
            begin = time.monotonic()
            got = wait()
            took = time.monotonic() - begin
        self.expect = took if self.expect == 0 else 0.5 * (self.expect + took)
        return got


def _model(mux: pymux.Mux, config: Config) -> Transformer:
    torch.manual_seed(config.seed)
    with mux.region("weights"):
        model: Transformer = Transformer(Shape(vocabulary=len(tasks.ALPHABET))).to(mux.device)
        return model


def _flat(model: Transformer) -> int:
    return sum(p.numel() for p in model.parameters())


def connect_as_sampler(config: Config) -> Connection:
    """Reach the job's trainer, which may not be there yet."""
    deadline = time.monotonic() + _PATIENCE
    while not Path(config.exchange).exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    return Client(config.exchange, "AF_UNIX")


def connect_as_trainer(config: Config) -> Connection:
    """Wait for the job's sampler."""
    with Listener(config.exchange, "AF_UNIX") as listener:
        return listener.accept()


def sample(mux: pymux.Mux, config: Config, trainer: Connection) -> dict[str, Any]:
    """Run the sampler."""
    rng = random.Random(config.seed)
    sampling = torch.Generator().manual_seed(config.seed)
    kind = tasks.KINDS[config.kind % len(tasks.KINDS)]
    half = config.prompts // HALVES
    model = _model(mux, config)
    with mux.region("kv_cache"):  # kept: a rollout may give way in its middle
        cache = model.new_cache(half * config.group)
    published = torch.empty(0, dtype=torch.float32)
    have, waits = 0, Waits()

    def newest(wanted: int) -> int:
        """Wait until the trainer has published these weights."""
        version = have
        while version < wanted:
            version = trainer.recv()
        return version

    def load(version: int) -> None:
        nonlocal published
        if not published.numel():
            published = torch.from_file(f"{config.exchange}.weights", shared=True, size=2 * _flat(model))
        at = (version % 2) * _flat(model)
        with torch.no_grad():
            for p in model.parameters():
                p.copy_(published[at : at + p.numel()].view_as(p))
                at += p.numel()

    scoring: list[threading.Thread] = []
    for step in range(config.steps):
        batch = [kind(rng) for _ in range(config.prompts)]
        with mux.phase("rollout") as lease:
            wanted = max(0, step - config.staleness)
            if wanted > have:
                have = waits(lease, partial(newest, wanted))
                load(wanted)
            for i in range(HALVES):
                part = batch[i * half : (i + 1) * half]
                prompts = torch.tensor([tasks.encode(t.prompt) for t in part]).repeat_interleave(config.group, 0)
                tokens = generate(
                    model, prompts.to(mux.device), cache, part[0].length, sampling, between=lease.yield_point
                ).cpu()
                previous = scoring[-1] if scoring else None
                scoring.append(threading.Thread(target=_score, args=(config, part, tokens, trainer, previous)))
                scoring[-1].start()
    for thread in scoring:
        thread.join()
    return {"rewards": [], "weights": ""}


def _score(
    config: Config, part: list[tasks.Task], tokens: torch.Tensor, trainer: Connection, previous: threading.Thread | None
) -> None:
    """Score half a batch and send it on, after the half before it."""
    answers = [tasks.decode(row[tasks.PROMPT_LENGTH :].tolist()) for row in tokens]
    cases = [(part[i // config.group].check, answer) for i, answer in enumerate(answers)]
    scores = sandbox.score(cases, latency=config.latency)
    if previous is not None:
        previous.join()
    trainer.send((tokens.tolist(), scores))


def learn(mux: pymux.Mux, config: Config, sampler: Connection, report: Callable[[int, float], None]) -> dict[str, Any]:
    """Run the trainer; `report` is told each step's mean reward."""
    model = _model(mux, config)
    optimizer = mux.adopt(
        torch.optim.AdamW(model.parameters(), lr=config.learning_rate, betas=(0.9, 0.95)), region="optimizer"
    )
    size = _flat(model)
    Path(f"{config.exchange}.weights").write_bytes(b"")
    published = torch.from_file(f"{config.exchange}.weights", shared=True, size=2 * size)
    rewards, waits = [], Waits()
    for step in range(config.steps):
        received = sampler.recv()  # nothing to train on: no phase
        scores: list[float] = []
        with mux.phase("train") as lease:
            for i in range(HALVES):
                if i > 0:
                    received = sampler.recv() if sampler.poll() else waits(lease, sampler.recv)
                tokens, part = torch.tensor(received[0]).to(mux.device), torch.tensor(received[1])
                scores += received[1]
                grouped = part.view(-1, config.group)
                advantages = (grouped - grouped.mean(1, keepdim=True)) / (grouped.std(1, keepdim=True) + 1e-4)
                log_p = log_probabilities(model, tokens, tasks.PROMPT_LENGTH)
                (-(advantages.view(-1, 1).to(mux.device) * log_p).mean() / HALVES).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        at = ((step + 1) % 2) * size
        for p in model.parameters():
            published[at : at + p.numel()] = mux.to_host(p).reshape(-1)
            at += p.numel()
        if step + 1 + config.staleness < config.steps:
            sampler.send(step + 1)
        rewards.append(sum(scores) / len(scores))
        report(step + 1, rewards[-1])
    at = (config.steps % 2) * size
    return {"rewards": rewards, "weights": published[at : at + size].clone()}
