"""Figures from the traces of jobs that shared a device. Pure.

A trace is what `Mux.trace` returns; all times are seconds of one clock.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any


@dataclass(frozen=True, kw_only=True, slots=True)
class Handoff:
    """The device going from one job to another.

    Attributes:
        before: the job that had it.
        after: the job that got it.
        begin: when the old phase had ended and the new one was asked for, seconds.
        end: when the new phase's body began, seconds.
    """

    before: str
    after: str
    begin: float
    end: float

    @property
    def seconds(self) -> float:
        """How long the device stood still for it."""
        return self.end - self.begin


def union_seconds(spans: Iterable[tuple[float, float]]) -> float:
    """Return the length of the union of (begin, end) spans."""
    total, reach = 0.0, float("-inf")
    for begin, end in sorted(spans):
        total += max(0.0, end - max(begin, reach))
        reach = max(reach, end)
    return total


def phases(trace: Mapping[str, Any]) -> list[tuple[float, float]]:
    """Return the (begin, end) of each phase body of a trace."""
    return [(s["begin"], s["end"]) for s in trace["spans"] if s["kind"] == "phase"]


def handoffs(traces: Mapping[str, Mapping[str, Any]]) -> list[Handoff]:
    """Return the changes of the device between jobs, in order of time."""
    bodies = []
    for job, trace in traces.items():
        asked = [s["begin"] for s in trace["spans"] if s["kind"] == "wait"]
        bodies += [(b, e, a, job) for (b, e), a in zip(phases(trace), asked, strict=False)]
    bodies.sort()
    out = []
    for (_, end, _, before), (begin, _, asked_at, after) in pairwise(bodies):
        if before != after:
            out.append(Handoff(before=before, after=after, begin=min(max(end, asked_at), begin), end=begin))
    return out


def percentile(values: Sequence[float], share: float) -> float:
    """Return the value below which `share` (0 to 1) of the values lie, by nearest rank; 0 of none."""
    if not values:
        return 0.0
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, max(0, round(share * len(ordered) + 0.5) - 1))]


def summarize(results: Sequence[Mapping[str, Any]], solo: Mapping[str, float] | None = None) -> dict[str, Any]:
    """Return the figures of one run.

    Args:
        results: of each job: ``job``, ``started``, ``finished``, ``trace``, ``rewards``.
        solo: seconds that each job takes alone; None where this run is that.
    """
    began = min(r["started"] for r in results)
    wall = max(r["finished"] for r in results) - began
    traces = {r["job"]: r["trace"] for r in results}
    busy = union_seconds(span for t in traces.values() for span in phases(t))
    seconds = [1e3 * h.seconds for h in handoffs(traces)]
    steps = sum(len(r["rewards"]) for r in results)
    slowdowns = [(r["finished"] - r["started"]) / solo[r["job"]] for r in results] if solo else [1.0]
    return {
        "wall_s": wall,
        "busy_fraction": busy / wall,
        "steps_per_minute": 60 * steps / wall,
        "handoffs": len(seconds),
        "handoff_p50_ms": percentile(seconds, 0.50),
        "handoff_p95_ms": percentile(seconds, 0.95),
        "bytes_moved": sum(s["bytes"] for t in traces.values() for s in t["swaps"]),
        "worst_slowdown": max(slowdowns),
    }
