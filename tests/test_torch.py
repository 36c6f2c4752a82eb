"""torch in regions: what users write, on the simulated device."""

import os
import signal

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

import pymux  # noqa: E402
from tests.conftest import PAGE  # noqa: E402


@pytest.fixture
def mux():
    with pymux.connect("test") as m:
        yield m


def inside(mux, region, *tensors):
    return all(mux.region(region).contains(t.untyped_storage().data_ptr()) for t in tensors)


def train(model, optimizer, steps, phase=None):
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        x = torch.randn(8, 16, generator=generator)
        if phase:
            with phase():
                model(x).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
        else:
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()


def new_model():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.GELU(), torch.nn.Linear(32, 4))


def test_a_module_built_in_a_region_lies_there(mux):
    with mux.region("weights"):
        model = new_model()
    assert inside(mux, "weights", *model.parameters())
    assert all(isinstance(p, torch.nn.Parameter) for p in model.parameters())


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.zeros(3, 4),
        lambda: torch.ones(5, dtype=torch.bfloat16),
        lambda: torch.full((2, 2), 7),
        lambda: torch.randn(10),
        lambda: torch.arange(9),
        lambda: torch.tensor([1.0, 2.0]),
        lambda: torch.eye(3),
        lambda: torch.zeros_like(torch.ones(4)),
        lambda: torch.ones(2, 3).t().contiguous(),
        lambda: torch.ones(3).clone(),
        lambda: torch.ones(3).to(torch.float64),
        lambda: torch.ones(3).new_full((2,), 5.0),
        lambda: torch.zeros(3, requires_grad=True),
    ],
)
def test_what_factories_return_lies_in_the_region_unchanged(mux, make):
    torch.manual_seed(3)
    expected = make()
    torch.manual_seed(3)
    with mux.region("r"):
        got = make()
    assert inside(mux, "r", got)
    assert got.requires_grad == expected.requires_grad
    assert got.stride() == expected.stride()
    with mux.phase("look"):
        assert torch.equal(got, expected)


def test_a_region_block_outside_a_phase_takes_a_lease_for_its_length(mux):
    with mux.region("weights"):
        assert mux.active
    assert not mux.active
    with mux.phase("init"):
        with mux.region("weights"):
            t = torch.ones(4)
        assert mux.active, "the phase goes on"
    assert inside(mux, "weights", t)


def test_adopt_keeps_objects_values_and_ties(mux):
    model = new_model()
    model.register_buffer("table", torch.arange(6.0))
    model[2].weight = torch.nn.Parameter(torch.ones(4, 32))
    model.tied = model[2].weight
    before = {n: p.clone() for n, p in model.state_dict().items()}
    objects = {n: id(p) for n, p in model.named_parameters()}
    assert mux.adopt(model) is model
    assert {n: id(p) for n, p in model.named_parameters()} == objects
    assert inside(mux, "weights", *model.parameters(), model.table)
    with mux.phase("look"):
        assert all(torch.equal(p, before[n]) for n, p in model.state_dict().items())
    assert model.tied.data_ptr() == model[2].weight.data_ptr()


def test_views_that_share_storage_go_on_sharing_it(mux):
    flat = torch.arange(12.0)
    a, b = flat[:6].view(2, 3), flat[6:]
    mux.adopt([flat, a, b])
    with mux.phase("x"):
        flat[0] = 99
        assert a[0, 0] == 99
        assert torch.equal(b, torch.arange(6.0, 12.0))


def test_optimizer_state_is_created_in_its_region_at_the_first_step(mux):
    with mux.region("weights"):
        model = new_model()
    optimizer = mux.adopt(torch.optim.AdamW(model.parameters()), region="optimizer")
    train(model, optimizer, 2, lambda: mux.phase("train"))
    for state in optimizer.state.values():
        assert inside(mux, "optimizer", state["exp_avg"], state["exp_avg_sq"])


def test_optimizer_state_that_is_loaded_later_comes_into_the_region(mux):
    with mux.region("weights"):
        model = new_model()
    plain = torch.optim.AdamW(model.parameters())
    with mux.phase("train"):
        train(model, plain, 1)
        saved = plain.state_dict()
    optimizer = mux.adopt(torch.optim.AdamW(model.parameters()), region="optimizer")
    with mux.phase("load"):
        optimizer.load_state_dict(saved)
    train(model, optimizer, 1, lambda: mux.phase("train"))
    assert all(inside(mux, "optimizer", s["exp_avg"]) for s in optimizer.state.values())


def test_an_optimizer_step_that_fails_leaves_nothing_open(mux):
    with mux.region("weights"):
        model = new_model()
    optimizer = mux.adopt(torch.optim.AdamW(model.parameters()), region="optimizer")

    def broken():
        raise ZeroDivisionError

    with mux.phase("train"):
        model(torch.ones(1, 16)).sum().backward()
        with pytest.raises(ZeroDivisionError):
            optimizer.step(broken)
    assert not inside(mux, "optimizer", torch.ones(3))
    train(model, optimizer, 1, lambda: mux.phase("train"))


def test_evicting_everything_leaves_nothing_on_the_device(mux, cuda):
    with mux.region("weights"):
        model = new_model()
    optimizer = mux.adopt(torch.optim.AdamW(model.parameters()), region="optimizer")
    train(model, optimizer, 1, lambda: mux.phase("train"))
    assert all(r["resident_bytes"] > 0 for r in mux.stats()["regions"].values())
    mux.evict()
    stats = mux.stats()
    assert all(r["resident_bytes"] == 0 for r in stats["regions"].values())
    assert stats["pages_held"] == 0
    assert cuda.counts()["mappings"] == 0
    assert cuda.counts()["handles"] == 0


def test_training_is_bit_identical_with_evictions_between_all_phases(mux):
    reference = new_model()
    train(reference, torch.optim.AdamW(reference.parameters()), 5)
    with mux.region("weights"):
        model = new_model()
    optimizer = mux.adopt(torch.optim.AdamW(model.parameters()), region="optimizer")

    def phase():
        mux.evict()
        return mux.phase("train")

    train(model, optimizer, 5, phase)
    for a, b in zip(model.parameters(), reference.parameters(), strict=True):
        assert torch.equal(mux.to_host(a), b)


def test_to_host_reads_views_from_wherever_they_are(mux):
    with mux.region("weights"):
        t = torch.arange(PAGE, dtype=torch.int16).view(-1, 64)
    expected = torch.arange(PAGE, dtype=torch.int16).view(-1, 64)
    for _ in range(2):
        assert torch.equal(mux.to_host(t), expected)
        assert torch.equal(mux.to_host(t.t()[3:5]), expected.t()[3:5])
        assert torch.equal(mux.to_host(t[::7, 5]), expected[::7, 5])
        mux.evict()
    assert mux.to_host(torch.ones(2)).tolist() == [1, 1]


def test_freeing_tensors_frees_their_blocks(mux):
    with mux.region("kv"):
        a = torch.empty(1000)
    assert mux.stats()["regions"]["kv"]["live_bytes"] > 0
    del a
    assert mux.stats()["regions"]["kv"]["live_bytes"] == 0


def test_tensors_outlive_the_mux():
    mux = pymux.connect("short")
    with mux.region("weights"):
        t = torch.ones(100)
    mux.close()
    del mux
    assert t.shape == (100,)


FAULT = """
import torch
mux = pymux.connect("job-with-fault")
with mux.region("weights"):
    t = torch.ones(100_000)
mux.evict()
def somewhere_in_user_code():
    return t.sum().item()
somewhere_in_user_code()
"""


def test_using_an_evicted_tensor_without_a_lease_ends_with_its_name_and_a_traceback(node):
    p = node.start(FAULT)
    _, err = p.communicate(timeout=60)
    assert p.returncode == -signal.SIGSEGV
    assert "RegionNotResident: job 'job-with-fault' touched region 'weights'" in err
    assert "mux.phase" in err
    assert "somewhere_in_user_code" in err


def test_check_mode_raises_before_the_access(node):
    out = node.run(
        """
import torch
mux = pymux.connect("checked")
with mux.region("weights"):
    t = torch.ones(100_000)
try:
    t.sum()
except pymux.RegionNotResident as e:
    say(e)
with mux.phase("x"):
    say(t.sum().item())
say(mux.to_host(t).sum().item())
""",
        PYMUX_CHECK="1",
    )
    lines = out.splitlines()
    assert "torch.sum touches region 'weights' outside a phase" in lines[0]
    assert lines[1:] == ["100000.0", "100000.0"]


def test_adopting_something_without_tensors_is_a_type_error(mux):
    with pytest.raises(TypeError, match="adopt"):
        mux.adopt(["text"])
    with pytest.raises(TypeError):
        mux.adopt([])


def test_a_tensor_larger_than_the_device_is_out_of_memory_and_the_region_still_works(mux):
    with mux.region("weights"):
        with pytest.raises(pymux.CapacityError):
            torch.empty(40 << 20)
        assert torch.ones(3).sum() == 3


def test_expandable_segments_are_found_by_the_doctor(monkeypatch):
    from pymux.doctor import examine

    assert all(f.ok for f in examine())
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    bad = [f for f in examine() if not f.ok]
    assert [f.what for f in bad] == ["torch allocator"]
    assert bad[0].remedy


def test_torch_is_not_imported_by_pymux(node):
    assert node.run("say('torch' in sys.modules)") == "False\n"
    assert os.environ["PYMUX_DRIVER"] == "sim"


CHECKED = """
import torch
mux = pymux.connect("checked")
def refused(f, error, *words):
    try: f()
    except error as e:
        for w in words: assert w in str(e), (w, str(e))
    else: raise AssertionError(f"not refused: {words}")
"""


def test_check_mode_knows_what_the_phase_uses_and_what_has_arrived(node):
    node.run(
        CHECKED
        + """
with mux.region("w"): w = torch.ones(4)
with mux.region("opt"): opt = torch.ones(4)
with mux.phase("rollout", uses=("w",)):
    w.add_(1)
    refused(lambda: opt.add_(1), pymux.RegionNotResident, "'opt'", "does not use", "uses=")
with mux.phase("train", uses=("w",), lazy=("opt",)) as lease:
    refused(lambda: opt.add_(1), pymux.RegionNotResident, "'opt'", "lease.require('opt')")
    lease.require("opt")
    opt.add_(1)
    lease.done_with("opt")
    refused(lambda: opt.add_(1), pymux.RegionNotResident, "'opt'", "done_with")
assert mux.to_host(w).tolist() == [2.0] * 4 and mux.to_host(opt).tolist() == [2.0] * 4
""",
        PYMUX_CHECK="1",
    )


def test_check_mode_finds_writes_to_a_frozen_region_wherever_they_come_from(node):
    node.run(
        CHECKED
        + """
base = mux.region("base", frozen=True)
with base:
    layer = torch.nn.Linear(4, 4)
    layer.weight.data.fill_(2)  # within the block it is being filled
optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
with mux.phase("train"):
    loss = layer(torch.ones(1, 4)).sum()  # reading is fine
    loss.backward()
    refused(optimizer.step, pymux.FrozenRegion, "'base'", "frozen")
    refused(lambda: layer.weight.data.mul_(2), pymux.FrozenRegion, "'base'")
    refused(lambda: torch.nn.init.zeros_(layer.bias), pymux.FrozenRegion, "'base'")
with base:
    layer.weight.data.fill_(3)
mux.evict()
assert mux.to_host(layer.weight).unique().tolist() == [3.0]
""",
        PYMUX_CHECK="1",
    )


def test_check_mode_poisons_what_was_discarded(node):
    node.run(
        CHECKED
        + """
with mux.region("kv", on_evict="discard"): kv = torch.ones(1024); ids = torch.arange(5)
mux.evict()
with mux.phase("use"):
    assert kv.isnan().all() and (ids == -1).all()
    kv.fill_(1)
    assert (kv == 1).all()
assert mux.stats()["regions"]["kv"]["lost_bytes"] == 2 * 2**20
""",
        PYMUX_CHECK="1",
    )


def test_without_check_mode_discarded_pages_are_not_filled(mux):
    with mux.region("kv2", on_evict="discard"):
        kv = torch.ones(1024)
    mux.evict("kv2")
    with mux.phase("use"):
        assert not kv.isnan().any()


def test_state_dicts_are_read_between_phases_wherever_the_tensors_are(mux):
    with mux.region("weights"):
        model = new_model()
    optimizer = mux.adopt(torch.optim.AdamW(model.parameters()), region="optimizer")
    train(model, optimizer, 2, lambda: mux.phase("train"))
    expected = {k: v.clone() for k, v in mux.state_dict(model).items()}
    mux.evict("optimizer")  # one here, one there
    saved = {"model": mux.state_dict(model), "optimizer": mux.state_dict(optimizer)}
    mux.evict()
    again = mux.state_dict(model)
    for k, v in expected.items():
        assert torch.equal(saved["model"][k], v)
        assert torch.equal(again[k], v)
        assert mux.region_of(again[k].data_ptr()) is None
    fresh = new_model()
    fresh.load_state_dict(saved["model"])
    other = torch.optim.AdamW(fresh.parameters())
    other.load_state_dict(saved["optimizer"])
    train(fresh, other, 2)
    train(model, optimizer, 2, lambda: mux.phase("train"))
    for a, b in zip(fresh.parameters(), model.parameters(), strict=True):
        assert torch.equal(a, mux.to_host(b))


def test_allocating_in_a_region_inside_a_phase_that_does_not_use_it_brings_it_in(mux):
    with mux.region("a"):
        first = torch.full((10,), 1.0)
    with mux.region("b"):
        other = torch.full((10,), 2.0)
    mux.evict()
    with mux.phase("only-a", uses=("a",), writes=()):
        first.sum()
        with mux.region("b"):
            more = torch.full((10,), 3.0)
        other.add_(1)  # the block said that the region is written
    mux.evict()
    assert mux.to_host(other).tolist() == [3.0] * 10
    assert mux.to_host(more).tolist() == [3.0] * 10


def test_a_phases_priority_is_that_of_the_stream_its_body_runs_on_and_ends_with_it(mux, monkeypatch):
    """Without a GPU torch has no streams: these stand in for them, and say what was asked."""
    seen, current = [], ["default"]

    class Stream:
        def __init__(self, device, priority):
            self.priority = priority
            seen.append((str(device), priority))

        def wait_stream(self, other):
            seen.append(("waits for", other))

    class Current:
        def __init__(self, stream):
            self.stream = stream

        def __enter__(self):
            current.append(self.stream)

        def __exit__(self, *exc):
            current.pop()

    integration = mux._torch_integration()
    monkeypatch.setattr(integration, "device", torch.device("cuda", 0))
    monkeypatch.setattr(integration, "before_leave", lambda: None)
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "stream", Current)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda *_: current[-1])
    with pytest.raises(RuntimeError, match="body"):
        with mux.phase("urgent", priority=-2):
            assert current[-1].priority == -2
            raise RuntimeError("body")
    assert current == ["default"]
    assert seen == [("cuda:0", -2), ("waits for", "default")]
    with mux.phase("background", priority=3) as lease:
        assert current[-1].priority == 0, "torch has none of less"
        with lease.idle():
            assert current == ["default"]
        assert current[-1].priority == 0
    with mux.phase("usual"):
        assert current == ["default"]


@pytest.mark.parametrize("options", [{"priority": "high"}, {"expect": -1.0}, {"devices": [7]}, {"devices": []}])
def test_phase_options_that_make_no_sense_are_refused_at_once(mux, options):
    with pytest.raises(pymux.ConfigError):
        mux.phase("p", **options)


@pytest.mark.parametrize(
    ("env", "ranks", "backend", "registers"),
    [
        ({}, 2, "nccl", True),
        ({"NCCL_GRAPH_REGISTER": "0"}, 2, "nccl", False),
        ({"NCCL_CUMEM_ENABLE": "0"}, 2, "nccl", False),
        ({}, 1, "nccl", False),
        ({}, 2, "gloo", False),
        ({}, 0, "nccl", False),  # no process group
    ],
)
def test_what_nccl_registers_is_known(monkeypatch, env, ranks, backend, registers):
    from pymux.integrations.torch import _registered_by_nccl

    for name in ("NCCL_GRAPH_REGISTER", "NCCL_CUMEM_ENABLE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: ranks > 0)
    monkeypatch.setattr(torch.distributed, "get_backend", lambda: backend)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: ranks)
    reason = _registered_by_nccl("NCCL_GRAPH_REGISTER", "1")
    assert (reason is not None) == registers
    assert reason is None or "NCCL_GRAPH_REGISTER=0" in reason
