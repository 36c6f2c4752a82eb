"""What a job of the demo is told. Plain data, without torch."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Literal

from pymux.mux import Swap

Role = Literal["loop", "sampler", "trainer"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Config:
    """A process of a job.

    Attributes:
        name: of the job.
        role: ``"loop"`` does everything in turn; ``"sampler"`` and ``"trainer"`` are two processes of one job.
        kind: index into `tasks.KINDS`.
        seed: of the model, the tasks and the sampling.
        steps: training steps.
        staleness: by how many steps the weights that a batch is sampled with may be behind.
        prompts: tasks a step.
        group: answers to each, for the group-relative advantage.
        learning_rate: of AdamW.
        latency: seconds of the sandbox, see `sandbox.score`.
        device: ordinal.
        swap: see `pymux.connect`.
        exchange: path of the socket between sampler and trainer.
        result: path of the JSON file to write.
    """

    name: str
    role: Role = "loop"
    kind: int
    seed: int
    steps: int
    staleness: int = 0
    prompts: int = 8
    group: int = 8
    learning_rate: float = 3e-4
    latency: float = 0.9
    device: int = 0
    swap: Swap = "demand"
    exchange: str = ""
    result: str = ""

    @property
    def process(self) -> str:
        """Name of the process, among all jobs'."""
        return self.name if self.role == "loop" else f"{self.name} {self.role}"

    def dump(self) -> str:
        """Return the command-line argument."""
        return json.dumps(asdict(self))
