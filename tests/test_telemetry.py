"""Figures from traces."""

import pytest

from pymux import report, telemetry


def trace(*spans, swaps=()):
    return {
        "spans": [{"kind": k, "name": "x", "begin": a, "end": b} for k, a, b in spans],
        "swaps": [{"direction": d, "begin": a, "end": b, "bytes": n} for d, a, b, n in swaps],
    }


def result(job, t, started=0.0, finished=10.0):
    return {"job": job, "trace": t, "started": started, "finished": finished, "rewards": [0, 1]}


def test_overlapping_spans_count_once():
    assert telemetry.union_seconds([(0, 2), (1, 3), (5, 6)]) == 4
    assert telemetry.union_seconds([]) == 0


def test_a_handoff_lasts_from_the_later_of_end_and_request_to_the_next_body():
    traces = {
        "a": trace(("wait", 0, 0), ("phase", 0, 4)),
        "b": trace(("wait", 2, 4.5), ("phase", 4.5, 6)),
        "c": trace(("wait", 8, 8.25), ("phase", 8.25, 9)),
    }
    assert [(h.before, h.after, h.seconds) for h in telemetry.handoffs(traces)] == [
        ("a", "b", 0.5),
        ("b", "c", 0.25),
    ]


def test_going_on_alone_is_no_handoff():
    assert telemetry.handoffs({"a": trace(("wait", 0, 0), ("phase", 0, 1), ("wait", 1, 1), ("phase", 1, 2))}) == []


def test_percentiles_are_by_nearest_rank():
    values = [5, 1, 4, 2, 3]
    assert telemetry.percentile(values, 0.5) == 3
    assert telemetry.percentile(values, 0.95) == 5
    assert telemetry.percentile([], 0.5) == 0


def test_a_run_is_summarized_and_drawn(tmp_path):
    results = [
        result("a", trace(("wait", 0, 0), ("phase", 0, 4), swaps=[("out", 4, 5, 100)])),
        result("b", trace(("wait", 1, 5), ("phase", 5, 9), swaps=[("in", 4, 5, 50)])),
    ]
    s = telemetry.summarize(results, {"a": 5.0, "b": 10.0})
    assert s["wall_s"] == 10
    assert s["busy_fraction"] == pytest.approx(0.8)
    assert s["bytes_moved"] == 150
    assert s["handoffs"] == 1
    assert s["handoff_p50_ms"] == pytest.approx(1000)
    assert s["worst_slowdown"] == 2
    assert s["steps_per_minute"] == 24
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    report.timeline(tmp_path / "t.png", {"one": results, "two": results})
    assert (tmp_path / "t.png").read_bytes()[:4] == b"\x89PNG"
    assert report.table({"one": s}).row_count == len(report.ROWS)
