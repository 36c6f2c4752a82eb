"""The demo's parts, and the whole in its shortest form."""

import json
import random

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from click.testing import CliRunner  # noqa: E402

from pymux.cli import main  # noqa: E402
from pymux.demo import sandbox, tasks  # noqa: E402
from pymux.demo.model import Shape, Transformer, generate, log_probabilities  # noqa: E402

ANSWERS = {
    tasks.add: lambda p: f"{int(p[2]) + int(p[4]):02d}",
    tasks.copy: lambda p: p[2:4] * 2,
    tasks.rise: lambda p: "".join(sorted(p[2:5])),
}


@pytest.mark.parametrize("kind", tasks.KINDS)
def test_right_answers_score_one_and_nonsense_little(kind):
    rng = random.Random(0)
    for _ in range(5):
        t = kind(rng)
        assert len(t.prompt) == tasks.PROMPT_LENGTH
        assert tasks.decode(tasks.encode(t.prompt)) == t.prompt
        right = ANSWERS[kind](t.prompt)
        assert len(right) == t.length
        assert sandbox.score([(t.check, right), (t.check, "+"), (t.check, "")], latency=0) == [
            pytest.approx(1),
            0,
            0,
        ]


@pytest.mark.parametrize(
    "code",
    [
        "__import__('socket').socket()",
        "open('/etc/passwd').read() and 1",
        "__import__('os').system('true') == 0",
        "__import__('subprocess').run(['true']) and 1",
        "len(bytearray(1 << 30)) and 1",
    ],
    ids=["network", "files", "shell", "subprocess", "memory"],
)
def test_the_sandbox_keeps_answers_from(code):
    assert sandbox.score([(code, "x"), ("1", "x")], latency=0) == [0.0, 1.0]


def test_an_endless_answer_scores_nothing_and_the_others_are_scored():
    assert sandbox.score([("sum(1 for _ in iter(int, 1))", "x"), ("1", "x")], latency=0) == [0.0, 1.0]


def test_a_sandbox_that_does_not_end_is_an_error():
    with pytest.raises(sandbox.SandboxError, match="did not end"):
        sandbox.score([("1", "x")], latency=1.0, timeout=-0.8)


def test_generation_with_the_cache_agrees_with_the_full_pass():
    torch.manual_seed(0)
    model = Transformer(Shape(vocabulary=11, width=32, heads=2, layers=2))
    prompts = torch.randint(11, (3, 5))
    cache = model.new_cache(3)
    with torch.no_grad():
        model(prompts, cache)
        tokens = torch.cat([prompts, torch.randint(11, (3, 1))], 1)
        step = model(tokens[:, -1:], cache, 5)[:, -1]
        torch.testing.assert_close(step, model(tokens)[:, -1], rtol=1e-4, atol=1e-5)
    sampled = generate(model, prompts, model.new_cache(3), 4, torch.Generator().manual_seed(0))
    assert sampled.shape == (3, 9)
    assert log_probabilities(model, sampled, 5).shape == (3, 4)


def test_the_demo_runs_three_ways_and_its_weights_agree(tmp_path):
    args = [
        "demo",
        "--jobs",
        "2",
        "--steps",
        "1",
        "--output",
        str(tmp_path / "out"),
        "--json",
        str(tmp_path / "r.json"),
    ]
    done = CliRunner().invoke(main, [*args, "--capacity", "200M"], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    report = json.loads((tmp_path / "r.json").read_text())
    assert report == json.loads((tmp_path / "out" / "report.json").read_text())
    assert report["weights_identical"] is True
    assert set(report["runs"]) == {"sequential", "snapshot", "pymux"}
    for run in report["runs"].values():
        assert 0 < run["busy_fraction"] <= 1
    assert report["runs"]["pymux"]["bytes_moved"] < report["runs"]["snapshot"]["bytes_moved"]
    assert (tmp_path / "out" / "timeline.png").stat().st_size > 10_000
    assert "bit-identical" in done.output


def test_asynchronous_jobs_learn_the_same_with_and_without_sharing(tmp_path):
    args = ["demo", "--mode", "async", "--staleness", "0", "--jobs", "2", "--steps", "2", "--output", str(tmp_path)]
    done = CliRunner().invoke(main, [*args, "--capacity", "256M"], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["weights_identical"] is True
    assert (report["mode"], report["staleness"]) == ("async", 0)
    assert "bit-identical" in done.output


def test_a_device_too_small_for_one_job_is_said_with_both_figures(tmp_path):
    done = CliRunner().invoke(
        main, ["demo", "--jobs", "1", "--steps", "1", "--capacity", "64M", "--output", str(tmp_path)]
    )
    assert done.exit_code != 0
    assert "CapacityError" in done.output
    assert "the device has 64 MiB" in done.output


def test_a_capacity_that_is_no_size_is_said(tmp_path):
    done = CliRunner().invoke(main, ["demo", "--capacity", "lots", "--output", str(tmp_path)])
    assert done.exit_code == 1
    assert "'lots' is not a size" in done.output
