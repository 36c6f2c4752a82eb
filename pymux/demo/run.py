"""Runs the same seeded jobs one after the other, with snapshots, and with pymux; compares them."""

from __future__ import annotations

import json
import os
import platform
import queue
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, cast

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from pymux import _core, config, report, telemetry
from pymux.demo import tasks
from pymux.demo.job import Config
from pymux.errors import PymuxError
from pymux.mux import Swap

STEPS = 16
CAPACITY = "320M"  # of the simulated device: two jobs and a quarter
# Bytes per second each way. A snapshot out and in (0.14 s) then stands to the phases (0.2 and 0.5 s) about as
# llm-d's recorded 21.3 + 2.5 s stand to the 45 and 70 s phases of veRL's hotpotqa-3b run, both on 2 x H100.
LINK = "2e9"
MODES: tuple[tuple[str, bool, Swap], ...] = (
    ("sequential", False, "demand"),
    ("snapshot", True, "snapshot"),
    ("pymux", True, "demand"),
)


class DemoError(PymuxError):
    """A job of the demo failed."""


class _Job:
    """A job's process, and the lines it prints."""

    def __init__(
        self, cfg: Config, env: Mapping[str, str], lines: queue.Queue[tuple[str, dict[str, Any] | None]]
    ) -> None:
        self.config = cfg
        self.log = Path(cfg.result).with_suffix(".log")
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "pymux.demo.job", cfg.dump()],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env=dict(env),
                text=True,
            )
        self._lines = lines
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._lines.put((self.config.name, json.loads(line)))
        self._lines.put((self.config.name, None))

    def go(self) -> None:
        """Start the training."""
        assert self.process.stdin is not None
        self.process.stdin.write("go\n")
        self.process.stdin.flush()

    def close(self) -> None:
        """End the process, however far it is."""
        self.process.kill()
        self.process.wait()
        self._reader.join()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                pipe.close()

    def result(self) -> dict[str, Any]:
        """Return what it measured."""
        code = self.process.wait()
        if code != 0:
            tail = self.log.read_text(errors="replace").strip()[-2000:]
            raise DemoError(f"job {self.config.name} ended with {code}:\n{tail}")
        return cast("dict[str, Any]", json.loads(Path(self.config.result).read_text(encoding="utf-8")))


def run(
    *, jobs: int, steps: int | None, capacity: str | None, device: int, json_path: Path | None, output: Path
) -> bool:
    """Run the demo and write its report.

    Args:
        jobs: how many share the device.
        steps: training steps of each; None for the default.
        capacity: device memory for regions, such as ``"320M"``; None for the default.
        device: ordinal.
        json_path: a second place for the report, or None.
        output: directory of report.json and timeline.png.

    Returns:
        Whether every job's final weights were identical in all runs.

    Raises:
        ConfigError: the capacity is not a size.
        DemoError: a job failed; the message has the end of its output.
    """
    steps = steps or STEPS
    size = config.parse_size(capacity or CAPACITY)
    output.mkdir(parents=True, exist_ok=True)
    console = Console()
    _core.load_driver(config.load().driver)
    name = _core.Device(device).name
    console.print(
        f"{jobs} GRPO jobs of {steps} steps on [bold]{name}[/bold], {size >> 20} MiB for regions. "
        f"The same seeded jobs run three ways."
    )
    results: dict[str, list[dict[str, Any]]] = {}
    with Progress(
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[reward]}"),
        TimeElapsedColumn(), console=console,
    ) as progress:  # fmt: skip
        for mode, together, swap in MODES:
            results[mode] = _run_mode(mode, together, swap, jobs, steps, size, device, progress)
    solo = {r["job"]: r["finished"] - r["started"] for r in results["sequential"]}
    runs = {mode: telemetry.summarize(rs, solo) for mode, rs in results.items()}
    hashes = [{r["job"]: r["weights"] for r in rs} for rs in results.values()]
    identical = all(h == hashes[0] for h in hashes)
    document = {
        "machine": f"{os.cpu_count()} cores, {platform.machine()}, Linux {platform.release()}",
        "date": time.strftime("%Y-%m-%d"),
        "device": name,
        "capacity_bytes": size,
        "jobs": jobs,
        "steps": steps,
        "runs": runs,
        "weights_identical": identical,
        "reward_first": _mean(r["rewards"][:2] for r in results["pymux"]),
        "reward_last": _mean(r["rewards"][-2:] for r in results["pymux"]),
    }
    text = json.dumps(document, indent=2) + "\n"
    for path in (output / "report.json", *([json_path] if json_path else [])):
        path.write_text(text, encoding="utf-8")
    report.timeline(output / "timeline.png", results)
    console.print(report.table(runs))
    console.print(f"mean reward {document['reward_first']:.2f} at first, {document['reward_last']:.2f} at last")
    console.print(
        "final weights are bit-identical in all three runs"
        if identical
        else "[red]final weights DIFFER between the runs[/red]"
    )
    console.print(f"wrote {output / 'report.json'} and {output / 'timeline.png'}")
    return identical


def _mean(groups: Iterable[Iterable[float]]) -> float:
    values = [v for g in groups for v in g]
    return sum(values) / len(values)


def _run_mode(
    mode: str, together: bool, swap: Swap, jobs: int, steps: int, size: int, device: int, progress: Progress
) -> list[dict[str, Any]]:
    """Run all jobs in one way, with a broker and (where simulated) a device of their own."""
    scratch = Path(tempfile.mkdtemp(prefix="pymux-demo-"))
    simulated = Path(tempfile.mkdtemp(prefix="pymux-demo-", dir="/dev/shm"))
    env = {
        **os.environ,
        "PYMUX_RUNTIME_DIR": str(scratch / "run"),
        "PYMUX_CAPACITY": str(size),
        "PYMUX_SIM_DIR": str(simulated),
        "PYMUX_SIM_CAPACITY": str(size),
        "PYMUX_SIM_LINK": LINK,
        "CUBLAS_WORKSPACE_CONFIG": ":4096:8",  # what cuBLAS needs to be deterministic
    }
    lines: queue.Queue[tuple[str, dict[str, Any] | None]] = queue.Queue()
    bars = {}
    running: list[_Job] = []
    try:
        for i in range(jobs):
            name = f"{tasks.KINDS[i % len(tasks.KINDS)].__name__}-{i}"
            cfg = Config(
                name=name,
                kind=i,
                seed=i,
                steps=steps,
                device=device,
                swap=swap,
                result=str(scratch / f"{name}.json"),
            )
            running.append(_Job(cfg, env, lines))
            bars[name] = progress.add_task(f"{mode:>10}  {name}", total=steps, reward="", start=False)
        for _ in running:
            name, line = lines.get()
            if line is None:
                next(j for j in running if j.config.name == name).result()
        waiting = list(running)
        unfinished = len(running)
        for job in waiting if together else waiting[:1]:
            job.go()
            progress.start_task(bars[job.config.name])
        del waiting[: len(waiting) if together else 1]
        while unfinished:
            name, line = lines.get()
            if line is not None:
                progress.update(bars[name], completed=line["step"], reward=f"reward {line['reward']:.2f}")
                continue
            unfinished -= 1
            next(j for j in running if j.config.name == name).result()
            progress.stop_task(bars[name])
            if waiting:
                job = waiting.pop(0)
                job.go()
                progress.start_task(bars[job.config.name])
        return [j.result() for j in running]
    finally:
        for job in running:
            job.close()
        _stop_broker(scratch / "run")
        shutil.rmtree(simulated, ignore_errors=True)
        shutil.rmtree(scratch, ignore_errors=True)


def _stop_broker(runtime_dir: Path) -> None:
    env = {**os.environ, "PYMUX_RUNTIME_DIR": str(runtime_dir)}
    subprocess.run(
        [sys.executable, "-m", "pymux.cli", "broker", "--stop"],
        env=env,
        capture_output=True,
        check=False,
        timeout=30,
    )
