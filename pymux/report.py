"""What a person sees of runs: a table and a picture of who had the device when."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

ROWS = (
    ("wall_s", "wall", "{:.1f} s", 1.0),
    ("busy_fraction", "device busy", "{:.0f} %", 100.0),
    ("steps_per_minute", "steps/min", "{:.0f}", 1.0),
    ("handoffs", "handoffs", "{:.0f}", 1.0),
    ("bytes_moved", "bytes moved", "{:.2f} GiB", 2.0**-30),
    ("handoff_p50_ms", "handoff p50", "{:.1f} ms", 1.0),
    ("handoff_p95_ms", "handoff p95", "{:.1f} ms", 1.0),
    ("worst_slowdown", "worst job's slowdown", "{:.2f} x", 1.0),
)


def table(runs: Mapping[str, Mapping[str, Any]]) -> Table:
    """Return a table of runs by name, one figure a row."""
    out = Table("", *runs)
    for key, label, form, scale in ROWS:
        out.add_row(label, *(form.format(run[key] * scale) for run in runs.values()))
    return out


def timeline(path: Path, runs: Mapping[str, Sequence[Mapping[str, Any]]]) -> None:
    """Draw who ran when, with waits and swaps; one panel a run, one row a job.

    Args:
        path: PNG file to write.
        runs: of each run the results of its jobs, see `telemetry.summarize`.
    """
    import matplotlib as mpl  # noqa: PLC0415 - optional

    mpl.use("Agg")
    from matplotlib import pyplot as plt  # noqa: PLC0415
    from matplotlib.patches import Patch  # noqa: PLC0415

    colours = {
        "rollout": "#4c78a8",
        "train": "#f58518",
        "other": "#9d755d",
        "wait": "#d9d9d9",
        "swap": "#e45756",
    }
    longest = max(max(r["finished"] for r in rs) - min(r["started"] for r in rs) for rs in runs.values())
    figure, axes = plt.subplots(len(runs), 1, figsize=(13, 1.1 + 1.25 * len(runs)), squeeze=False, sharex=True)
    for axis, (name, results) in zip(axes[:, 0], runs.items(), strict=True):
        origin = min(r["started"] for r in results)
        for row, result in enumerate(results):
            bars: dict[str, list[tuple[float, float]]] = {}
            for s in result["trace"]["spans"]:
                kind = "wait" if s["kind"] == "wait" else s["name"] if s["name"] in colours else "other"
                bars.setdefault(kind, []).append((s["begin"] - origin, s["end"] - s["begin"]))
            for kind in ("wait", "other", "rollout", "train"):
                axis.broken_barh(bars.get(kind, []), (row - 0.32, 0.64), color=colours[kind], linewidth=0)
            swaps = [(s["begin"] - origin, s["end"] - s["begin"]) for s in result["trace"]["swaps"] if s["bytes"]]
            axis.broken_barh(swaps, (row + 0.32, 0.13), color=colours["swap"], linewidth=0)
        axis.set_yticks(range(len(results)), [r["job"] for r in results])
        axis.set_ylim(len(results) - 0.4, -0.5)
        axis.set_xlim(0, longest)
        axis.set_title(name, loc="left", fontsize=10)
        for side in ("top", "right"):
            axis.spines[side].set_visible(False)
    axes[-1, 0].set_xlabel("seconds")
    labels = {
        "rollout": "rollout",
        "train": "train",
        "other": "set-up",
        "wait": "waits for the device",
        "swap": "swaps",
    }
    figure.legend(
        handles=[Patch(color=colours[k], label=v) for k, v in labels.items()],
        loc="upper right", ncols=len(labels), fontsize=8, frameon=False,
    )  # fmt: skip
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)
