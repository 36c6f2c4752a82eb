"""What drops in, on a GPU: shared tensors, the replaced allocator with graphs, and a process shared as a whole."""

import contextlib
import os
import subprocess
import sys
import textwrap

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from tests.conftest import HELPERS, hear, say  # noqa: E402

pytestmark = pytest.mark.gpu


@contextlib.contextmanager
def process(code, **env):
    p = subprocess.Popen(
        [sys.executable, "-c", HELPERS + "import torch\n" + textwrap.dedent(code)],
        env={**os.environ, **env},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        yield p
    finally:
        p.kill()
        p.communicate()


def test_a_trainers_weights_are_the_samplers_without_a_copy():
    trainer = """
    mux = pymux.connect("share", name="trainer")
    with mux.region("weights") as region:
        w = torch.full((64, 1 << 20), 1.0, device=mux.device, dtype=torch.bfloat16)
    say(region.share({"w": w}))
    for value in iter(hear, ""):
        with mux.phase("train"):
            w.fill_(float(value))
            say(region.publish())
    """
    sampler = """
    mux = pymux.connect("share", name="sampler")
    weights = mux.open_shared(os.environ["TOKEN"])
    say("ready")
    for _ in iter(hear, ""):
        with mux.phase("rollout"):
            weights.wait_published()
            w = weights.tensors["w"]
            say(f"{w.device.type} {tuple(w.shape)} {float(w.float().mean())}")
        s = mux.stats()["regions"]["weights"]
        say(s["swapped_in_bytes"] + s["swapped_out_bytes"])
    """
    with process(trainer) as t:
        token = hear(t)
        with process(sampler, TOKEN=token) as s:
            assert hear(s) == "ready"
            for generation, value in enumerate((2, 3, 5), 2):
                say(t, str(value))
                assert int(hear(t)) == generation
                say(s)
                assert hear(s) == f"cuda (64, 1048576) {float(value)}"
                assert hear(s) == "0"


def test_a_graphs_private_pool_in_the_replaced_allocator_survives_a_swap():
    code = """
    import pymux.torch
    region = pymux.torch.install()
    mux = region.mux
    with mux.phase("capture"):
        x = torch.ones(1 << 20, device="cuda")
        y = torch.zeros_like(x)
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            y.copy_(torch.relu(x) * 2)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y.copy_(torch.relu(x) * 2 + y)
    mux.evict()
    with mux.phase("replay"):
        y.zero_()
        for _ in range(3):
            graph.replay()
        torch.cuda.synchronize()
        say(float(y.sum()) / (1 << 20))
    """
    with process(code) as p:
        assert hear(p) == "6.0"


def test_a_graphs_memory_in_a_region_survives_a_swap():
    code = """
    mux = pymux.connect("graph")
    region = mux.region("graph")
    with mux.region("weights"):
        x = torch.ones(1 << 20, device=mux.device)
    with mux.phase("capture"):
        graph = torch.cuda.CUDAGraph()
        with region.capture_graph(graph):
            y = torch.relu(x) * 2
    assert region.contains(y.data_ptr())
    mux.evict()
    with mux.phase("replay"):
        graph.replay()
        torch.cuda.synchronize()
        say(float(y.sum()) / (1 << 20))
    """
    with process(code) as p:
        assert hear(p) == "2.0"


def test_a_process_of_plain_torch_is_shared_as_a_whole():
    guest = """
    x = torch.arange(1 << 24, device="cuda", dtype=torch.float32)
    say(os.getpid())
    for _ in iter(hear, ""):
        x += 1
        say(float(x[0]))
    """
    host = """
    try:
        guest = pymux.opaque(int(os.environ["GUEST"]), job="legacy")
    except pymux.DriverError as e:
        say("no " + str(e))
        sys.exit()
    say(guest.state)
    for _ in iter(hear, ""):
        with guest.phase():
            say(guest.state)
            hear()
        say(guest.state)
    """
    with process(guest) as g:
        pid = hear(g)
        with process(host, GUEST=pid) as h:
            state = hear(h)
            if state.startswith("no "):
                pytest.skip(state)
            assert state == "checkpointed"
            say(h)
            assert hear(h) == "running"
            say(g)
            assert hear(g) == "1.0"
            say(h)
            assert hear(h) == "locked"
