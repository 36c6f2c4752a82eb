"""torch in regions on a GPU: the memory pool, graphs, and two processes that hand over."""

import subprocess
import sys

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

import pymux  # noqa: E402
from tests.conftest import HELPERS  # noqa: E402
from tests.test_torch import inside, new_model  # noqa: E402

pytestmark = pytest.mark.gpu


@pytest.fixture
def mux():
    with pymux.connect("gpu-test") as m:
        yield m


def test_tensors_of_a_region_block_lie_in_the_region(mux):
    with mux.region("weights"):
        model = new_model().to(mux.device)
    outside = torch.ones(1000, device=mux.device)
    assert inside(mux, "weights", *model.parameters())
    assert not inside(mux, "weights", outside)


def test_an_evicted_model_uses_no_device_memory_and_comes_back_whole(mux):
    with mux.region("weights"):
        big = torch.arange(64 << 20, device=mux.device, dtype=torch.int32)
    before = torch.cuda.mem_get_info()[0]
    mux.evict()
    assert torch.cuda.mem_get_info()[0] >= before  # the pages are the bank's, not the process's
    assert mux.stats()["regions"]["weights"]["resident_bytes"] == 0
    assert torch.equal(mux.to_host(big), torch.arange(64 << 20, dtype=torch.int32))
    with mux.phase("use"):
        assert torch.equal(big.cpu(), torch.arange(64 << 20, dtype=torch.int32))


def test_adopted_optimizer_state_lies_in_its_region(mux):
    with mux.region("weights"):
        model = new_model().to(mux.device)
    optimizer = mux.adopt(torch.optim.AdamW(model.parameters()), region="optimizer")
    with mux.phase("train"):
        model(torch.randn(8, 16, device=mux.device)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert all(inside(mux, "optimizer", s["exp_avg"], s["exp_avg_sq"]) for s in optimizer.state.values())


def test_work_on_a_side_stream_is_waited_for_before_a_swap(mux):
    with mux.region("weights"):
        t = torch.zeros(32 << 20, device=mux.device)
    side = torch.cuda.Stream()
    with mux.phase("x"), torch.cuda.stream(side):
        for _ in range(50):
            t.add_(1)
    mux.evict()
    assert mux.to_host(t).eq(50).all()


def test_a_graph_replays_after_its_memory_was_out_and_back(mux):
    with mux.region("weights"):
        x = torch.ones(1 << 20, device=mux.device)
        y = torch.zeros(1 << 20, device=mux.device)
    with mux.phase("capture"):
        y.add_(x)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y.add_(x)
    mux.evict()
    with mux.phase("replay"):
        y.zero_()
        graph.replay()
        torch.cuda.synchronize()
        assert y.eq(1).all()


JOB = """
import torch
mux = pymux.connect(os.environ["NAME"])
share = int(torch.cuda.mem_get_info()[1] * float(os.environ["SHARE"]))
with mux.region("weights"):
    t = torch.full((share // 4,), float(os.environ["VALUE"]), device=mux.device)
say("ready")
for _ in iter(hear, ""):
    with mux.phase("x"):
        t.add_(1)
        say(bool((t == t[0]).all()) and t[0].item())
"""


def test_two_processes_with_most_of_the_memory_each_hand_over(tmp_path):
    import os

    def start(name, value):
        env = {**os.environ, "NAME": name, "VALUE": str(value), "SHARE": "0.05"}
        return subprocess.Popen(
            [sys.executable, "-c", HELPERS + JOB], env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    jobs = [start("first", 10), start("second", 20)]
    try:
        assert [p.stdout.readline().strip() for p in jobs] == ["ready", "ready"]
        for turn in (1, 2, 3):
            for p, value in zip(jobs, (10, 20), strict=True):
                p.stdin.write("go\n")
                p.stdin.flush()
                assert float(p.stdout.readline()) == value + turn
    finally:
        for p in jobs:
            p.kill()
            p.communicate()
