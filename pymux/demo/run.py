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
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from pymux import _core, config, report, telemetry
from pymux.demo import tasks
from pymux.demo.config import Config, Role
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
            self._lines.put((self.config.process, json.loads(line)))
        self._lines.put((self.config.process, None))

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
            raise DemoError(f"job {self.config.process} ended with {code}:\n{tail}")
        return cast("dict[str, Any]", json.loads(Path(self.config.result).read_text(encoding="utf-8")))


def run(
    *,
    mode: str,
    staleness: int,
    jobs: int,
    steps: int | None,
    capacity: str | None,
    device: int,
    json_path: Path | None,
    output: Path,
) -> bool:
    """Run the demo and write its report.

    Args:
        mode: ``"sync"``: each job is one process; ``"async"``: a sampler and a trainer.
        staleness: of an asynchronous job, see `Config`.
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
    kind = "GRPO jobs" if mode == "sync" else f"asynchronous GRPO jobs (staleness {staleness})"
    console.print(
        f"{jobs} {kind} of {steps} steps on [bold]{name}[/bold], {size >> 20} MiB for regions. "
        f"The same seeded jobs run three ways."
    )
    roles: tuple[Role, ...] = ("loop",) if mode == "sync" else ("sampler", "trainer")
    results: dict[str, list[dict[str, Any]]] = {}
    with Progress(
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[reward]}"),
        TimeElapsedColumn(), console=console,
    ) as progress:  # fmt: skip
        for way, together, swap in MODES:
            configs = [
                [
                    Config(
                        name=f"{tasks.KINDS[i % len(tasks.KINDS)].__name__}-{i}",
                        role=role,
                        kind=i,
                        seed=i,
                        steps=steps,
                        staleness=staleness,
                        device=device,
                        swap=swap,
                    )
                    for role in roles
                ]
                for i in range(jobs)
            ]
            results[way] = _run_way(way, configs, together, size, progress)
    solo = {r["job"]: r["finished"] - r["started"] for r in results["sequential"]}
    runs = {way: telemetry.summarize(rs, solo) for way, rs in results.items()}
    hashes = [{r["job"]: r["weights"] for r in rs} for rs in results.values()]
    identical = all(h == hashes[0] for h in hashes)
    document = {
        "machine": f"{os.cpu_count()} cores, {platform.machine()}, Linux {platform.release()}",
        "date": time.strftime("%Y-%m-%d"),
        "device": name,
        "capacity_bytes": size,
        "mode": mode,
        "staleness": staleness if mode == "async" else None,
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


def _run_way(
    way: str, configs: Sequence[Sequence[Config]], together: bool, size: int, progress: Progress
) -> list[dict[str, Any]]:
    """Run all jobs in one way, with a broker and (where simulated) a device of their own.

    Args:
        way: what it is called.
        configs: of each job, its processes.
        together: all jobs at once, or one after the other.
        size: bytes of the device.
        progress: shows how far they are.
    """
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
    running: list[list[_Job]] = []
    try:
        for members in configs:
            name = members[0].name
            running.append(
                [
                    _Job(
                        replace(
                            c, exchange=str(scratch / f"{name}.exchange"), result=str(scratch / f"{c.process}.json")
                        ),
                        env,
                        lines,
                    )
                    for c in members
                ]
            )
            bars[name] = progress.add_task(f"{way:>10}  {name}", total=members[0].steps, reward="", start=False)
        processes = {p.config.process: (job, p) for job in running for p in job}
        for _ in processes:
            name, line = lines.get()
            if line is None:
                processes[name][1].result()

        def start(job: list[_Job]) -> None:
            for p in job:
                p.go()
            progress.start_task(bars[job[0].config.name])

        waiting = list(running)
        for _ in range(len(waiting) if together else 1):
            start(waiting.pop(0))
        unfinished = {id(job): len(job) for job in running}
        while any(unfinished.values()):
            name, line = lines.get()
            job, process = processes[name]
            if line is not None:
                bar = bars[process.config.name]
                progress.update(bar, completed=line["step"], reward=f"reward {line['reward']:.2f}")
                continue
            process.result()
            unfinished[id(job)] -= 1
            if unfinished[id(job)] == 0:
                progress.stop_task(bars[process.config.name])
                if waiting:
                    start(waiting.pop(0))
        return [p.result() for job in running for p in job]
    finally:
        for job in running:
            for p in job:
                p.close()
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
