"""What people hand over: nests of tensors, views of every kind, files, queues, and regions inside of regions."""

import collections
import copy
import io
import warnings

import pytest

import pymux
from tests.conftest import PAGE, ROOT  # noqa: F401

torch = pytest.importorskip("torch")
from torch import nn  # noqa: E402


@pytest.fixture
def mux():
    with pymux.connect("tensors") as m:
        yield m


def inside(mux, region, *tensors):
    return all(mux.region(region).contains(t.untyped_storage().data_ptr()) for t in tensors)


# ---- adopt -------------------------------------------------------------------------------------


def test_nests_of_dicts_lists_and_tuples_are_adopted_and_stay_the_same_objects(mux):
    a, b, c, d = (torch.full((100,), float(i)) for i in range(4))
    module = nn.Linear(10, 10)
    optimizer = torch.optim.Adam([torch.nn.Parameter(torch.ones(5))])
    Pair = collections.namedtuple("Pair", "x y")  # noqa: PYI024
    nest = {"a": a, "more": [b, (c, {"deep": d})], "named": Pair(a, module), "step": 3, "name": "x", "none": None}
    nest["itself"] = nest
    assert mux.adopt(nest) is nest
    assert inside(mux, "weights", a, b, c, d, module.weight, module.bias)
    with mux.phase("look"):
        assert [t[0].item() for t in (a, b, c, d)] == [0, 1, 2, 3]
    mux.adopt(module.state_dict(), region="other")
    mux.adopt((p for p in module.parameters()), region="third")
    assert inside(mux, "third", module.weight)
    mux.adopt(optimizer)


def test_a_state_dict_that_was_loaded_is_adopted(mux):
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": torch.optim.AdamW(model.parameters()).state_dict()}, file)
    file.seek(0)
    state = torch.load(file)
    mux.adopt(state)
    assert inside(mux, "weights", *state["model"].values())


class Odd:
    pass


REFUSED = {
    "nothing": (None, "found None"),
    "a number": (5, "no tensor in this int"),
    "a text": ("weights", "no tensor in this str"),
    "an empty list": ([], "no tensor in this list"),
    "an object": (Odd(), "found a Odd"),
    "an object within": ([torch.ones(2), {"x": Odd()}], r"found a Odd at \[1\]\['x'\]"),
    "None in a list": ([torch.ones(2), None], r"found None at \[1\]"),
    "sparse": (torch.eye(3).to_sparse(), "sparse_coo.*indices and values"),
    "meta": (torch.empty(3, device="meta"), "meta device.*to_empty"),
    "meta in a module": (nn.Linear(2, 2, device="meta"), "meta device.*at weight"),
    "lazy": (nn.LazyLinear(3), "lazy module.*at weight"),
}


@pytest.mark.parametrize("case", REFUSED, ids=list(REFUSED))
def test_what_cannot_be_adopted_gets_a_sentence_and_changes_nothing(mux, case):
    what, text = REFUSED[case]
    with pytest.raises(TypeError, match=text) as e:
        mux.adopt(what)
    assert len(str(e.value)) < 300
    assert mux.stats()["regions"]["weights"]["live_bytes"] == 0
    mux.adopt(torch.ones(3))


def test_quantized_and_nested_tensors_get_a_sentence(mux):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        quantized = torch.quantize_per_tensor(torch.randn(4), 0.1, 0, torch.qint8)
        nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])
        with pytest.raises(TypeError, match="sparse_csr"):
            mux.adopt(torch.eye(3).to_sparse_csr())
        with pytest.raises(TypeError, match="quantized.*int_repr"):
            mux.adopt([quantized])
        with pytest.raises(TypeError, match="nested tensor"):
            mux.adopt([nested])
    assert quantized.dequantize().numel() == 4, "it is as it was"


def test_lazy_bits_survive_being_adopted(mux):
    z = torch.tensor([1 + 2j, 3 - 1j])
    views = {"conj": z.clone().conj(), "neg": z.clone().conj().imag}
    before = {k: v.resolve_conj().resolve_neg().clone() for k, v in views.items()}
    mux.adopt(views)
    assert inside(mux, "weights", *views.values())
    with mux.phase("look"):
        assert all(torch.equal(views[k].resolve_conj().resolve_neg(), before[k]) for k in views)


def test_tensors_freed_while_evicted_are_not_moved_again(mux):
    with mux.region("weights"):
        keep, drop = torch.ones(PAGE // 4), torch.ones(3 * PAGE // 4)
    mux.evict()
    before = mux.stats()["regions"]["weights"]["swapped_in_bytes"]
    del drop
    with mux.phase("look"):
        assert keep[0] == 1
    assert mux.stats()["regions"]["weights"]["swapped_in_bytes"] - before <= PAGE + 4096
    assert mux.stats()["regions"]["weights"]["live_bytes"] <= PAGE


# ---- to_host ------------------------------------------------------------------------------------


def views():
    z = torch.randn(4, 6, dtype=torch.complex64)
    x = torch.randn(4, 6)
    return {
        "plain": x,
        "transposed": x.t(),
        "a slice": x[1:3, ::2],
        "expanded": x[:, :1].expand(4, 9),
        "permuted": torch.randn(2, 3, 4).permute(2, 0, 1),
        "channels last": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        "overlapping": x.as_strided((3, 3), (1, 1), 2),
        "a scalar": x[2, 3],
        "empty": x[:0],
        "conj": z.conj(),
        "mH": z.mH,
        "adjoint of a slice": z[1:, 2:].adjoint(),
        "imag of conj": z.conj().imag,
        "real of conj": z.conj().real,
        "conj of imag view": torch.view_as_complex(torch.randn(3, 2)).conj(),
        "neg view": torch._neg_view(x),
        "needs grad": nn.Parameter(torch.randn(3)),
        "bool": torch.tensor([True, False]),
        "int8": torch.arange(5, dtype=torch.int8),
        "uint16": torch.arange(5, dtype=torch.int32).to(torch.uint16),
        "bfloat16": torch.randn(5).bfloat16(),
        "float8": torch.randn(8).to(torch.float8_e4m3fn),
        "half complex": torch.view_as_complex(torch.randn(3, 2).half()),
        "complex128": torch.randn(3, dtype=torch.complex128).conj(),
    }


def bits(x):
    x = x.resolve_conj().resolve_neg().contiguous()
    x = torch.view_as_real(x) if x.is_complex() else x
    return x.view(torch.uint8) if x.dim() else x


@pytest.mark.filterwarnings("ignore:ComplexHalf")
@pytest.mark.parametrize("kind", list(views()))
def test_to_host_keeps_what_a_tensor_means(mux, kind):
    torch.manual_seed(1)
    expected = views()[kind].detach()
    torch.manual_seed(1)
    with mux.region("weights"):
        t = views()[kind]
    if t.numel():
        assert inside(mux, "weights", t)
    mux.evict()
    got = mux.to_host(t)
    assert (got.shape, got.dtype) == (expected.shape, expected.dtype)
    assert not got.requires_grad
    if got.numel():
        assert not mux.region("weights").contains(got.data_ptr())
    same = torch.equal(*(bits(x) for x in (got, expected)))  # pytest shows what an assert compares, and reads it
    assert same


def test_to_host_of_what_is_no_strided_tensor(mux):
    with pytest.raises(TypeError, match="not a list"):
        mux.to_host([1])
    outside = torch.eye(3).to_sparse()
    assert torch.equal(mux.to_host(outside).to_dense(), torch.eye(3)), "outside regions it is copied as usual"
    with mux.region("weights"):
        values = torch.ones(3)
    sparse = torch.sparse_coo_tensor(torch.arange(3)[None], values, (5,), check_invariants=False)
    mux.evict()
    assert mux.region("weights").contains(sparse._values().data_ptr())
    with pytest.raises(TypeError, match="sparse_coo"):
        mux.to_host(sparse)


def test_a_lazy_view_is_not_shared_without_its_bit(mux):
    with mux.region("weights") as region:
        z = torch.ones(3, dtype=torch.complex64)
        with pytest.raises(TypeError, match="resolve_conj"):
            region.share({"z": z.conj()})


# ---- the innermost region -----------------------------------------------------------------------


def test_the_innermost_region_decides(mux):
    kv, weights = mux.region("kv", on_evict="discard"), mux.region("weights")

    def constructor():
        with weights:
            return torch.zeros(10), torch.ones(3).clone(), nn.Linear(2, 2)

    with kv:
        before = torch.zeros(5)
        a, b, layer = constructor()
        after = torch.zeros(5)
        with kv, weights, kv:
            c = torch.zeros(2)
    assert inside(mux, "weights", a, b, layer.weight)
    assert inside(mux, "kv", before, after, c)


def test_the_innermost_tag_decides_in_the_other_interface(node):
    out = node.run(
        """
import torch
from pymux.compat import torch_memory_saver as tms
saver = tms.install()
with saver.region(tag="kv_cache"):
    outer = torch.zeros(10)
    with saver.region(tag="weights", enable_cpu_backup=True):
        w = torch.ones(10)
    again = torch.zeros(10)
saver.pause()
saver.resume()
say(w.sum().item())
mux = pymux.current()
say([mux.region_of(t.data_ptr()).name for t in (outer, w, again)])
"""
    )
    assert out.splitlines() == ["10.0", "['kv_cache', 'weights, kept', 'kv_cache']"]


def test_pools_of_a_gpus_form_are_begun_innermost_alone(mux, monkeypatch):
    """torch serves a thread from the pool that was begun first: the outer one has to end for so long."""
    import contextlib

    from pymux.integrations.torch import Integration

    begun, seen = [], []

    @contextlib.contextmanager
    def use_mem_pool(pool, device=None):
        assert begun == [], "two at once"
        begun.append(pool)
        try:
            yield
        finally:
            begun.remove(pool)

    monkeypatch.setattr(torch.cuda, "use_mem_pool", use_mem_pool)
    i = Integration(mux)
    with i._innermost("kv", None):
        seen += begun
        with i._innermost("weights", None):
            seen += begun
            with i._innermost("kv", None):
                seen += begun
        seen += begun
        with contextlib.suppress(ValueError), i._innermost("weights", None):
            raise ValueError
        seen += begun
    assert seen == ["kv", "weights", "kv", "kv", "kv"]
    assert begun == []


# ---- what torch makes in a block ------------------------------------------------------------------


def test_what_torch_makes_from_tensors_in_a_block_is_the_regions(mux):
    outside = torch.ones(6)
    outside.grad = torch.ones(6)
    file = io.BytesIO()
    tied = nn.Linear(3, 3)
    flat = torch.arange(6.0)
    torch.save({"flat": flat, "view": flat[2:], "w": tied.weight, "again": tied.weight}, file)
    file.seek(0)
    with mux.region("weights"):
        base = torch.ones(2, 3)
        made = {
            "stack": torch.stack([base, base]),
            "cat": torch.cat([base, base]),
            "plus": base + 1,
            "matmul": base @ base.t(),
            "split": torch.split(torch.cat([base, base]), 1)[0],
            "max": base.max(dim=0).values,
            "copied": copy.deepcopy(outside),
            "clone": outside.clone(),
        }
        loaded = torch.load(file)
        copied = copy.deepcopy(nn.ModuleList([tied, tied]))
        gradient = outside.grad
        view = outside[1:]
    assert inside(mux, "weights", *made.values(), *loaded.values(), *copied.parameters())
    assert not inside(mux, "weights", gradient)
    assert not inside(mux, "weights", view)
    assert loaded["flat"].untyped_storage().data_ptr() == loaded["view"].untyped_storage().data_ptr()
    assert loaded["w"].data_ptr() == loaded["again"].data_ptr()
    mux.evict()
    with mux.phase("look"):
        assert torch.equal(loaded["view"], flat[2:])
        assert made["plus"].sum() == 12


def test_training_in_a_block_gives_the_same_gradients(mux):
    def step():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))
        model(torch.ones(3, 4)).exp().sum().backward()
        return [p.grad.clone() for p in model.parameters()]

    expected = step()
    with mux.region("weights"):
        got = step()
        assert all(torch.equal(a, b) for a, b in zip(expected, got, strict=True))


# ---- files and queues -------------------------------------------------------------------------------


def test_a_region_tensor_does_not_go_through_a_queue(mux):
    import torch.multiprocessing as mp

    with mux.region("weights"):
        t, module = torch.ones(10), nn.Linear(2, 2)
    queue = mp.get_context("spawn").SimpleQueue()
    with mux.phase("send"):
        for send in (lambda: queue.put(t), t.share_memory_, module.share_memory, lambda: queue.put({"x": [t]})):
            with pytest.raises(pymux.RegionError, match=r"'weights'.*region.share\(") as e:
                send()
            assert len(str(e.value)) < 300
    assert inside(mux, "weights", t, module.weight)
    queue.put(torch.ones(3))
    assert queue.get().sum() == 3, "others do"


def test_check_mode_is_an_exception_whatever_reads(node):
    out = node.run(
        """
import copy, io, pickle, torch
mux = pymux.connect("check")
with mux.region("w"):
    t = torch.ones(PAGE); model = torch.nn.Linear(300, 300)
mux.evict()
ways = {
    "save": lambda: torch.save(model.state_dict(), io.BytesIO()),
    "save old": lambda: torch.save(t, io.BytesIO(), _use_new_zipfile_serialization=False),
    "save module": lambda: torch.save(model, io.BytesIO()),
    "save storage": lambda: torch.save(t.untyped_storage(), io.BytesIO()),
    "pickle": lambda: pickle.dumps(t),
    "pickle storage": lambda: pickle.dumps(t.untyped_storage()),
    "deepcopy": lambda: copy.deepcopy(model),
    "numpy": lambda: t.numpy()[0],
    "repr": lambda: repr(t),
    "item": lambda: t[0].item(),
    "tolist": lambda: t.untyped_storage().tolist(),
    "bytes": lambda: t.untyped_storage()[0],
    "clone storage": lambda: t.untyped_storage().clone(),
    "add": lambda: t + 1,
    "forward": lambda: model(torch.ones(300)),
    "copy": lambda: model.weight.data.copy_(torch.zeros(300, 300)),
    "array": lambda: __import__("numpy").asarray(t),
    "save parameter": lambda: torch.save(model.weight, io.BytesIO()),
}
for name, way in ways.items():
    try: way()
    except pymux.RegionNotResident: continue
    say(name)
with mux.phase("p"):
    torch.save(model.state_dict(), io.BytesIO()); pickle.dumps(t)
torch.save(mux.state_dict(model), io.BytesIO())
say("alive")
""",
        PYMUX_CHECK="1",
    )
    assert out.split() == ["alive"]
