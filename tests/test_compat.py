"""torch_memory_saver's interface."""

import pytest

from tests.conftest import hear, say

SETUP = """
import torch
import pymux.compat.torch_memory_saver as compat
compat.install()
import torch_memory_saver
saver = torch_memory_saver.torch_memory_saver
def held(): return saver._mux.stats()["pages_held"]
"""


def test_paused_memory_is_others_and_comes_back_at_its_address(node):
    a = node.start(
        SETUP
        + """
with saver.region(tag="weights", enable_cpu_backup=True):
    w = torch.arange(4 * MIB, dtype=torch.float32)
with saver.region(tag="kv_cache"):
    kv = torch.ones(20 * MIB, dtype=torch.uint8)
at = w.data_ptr(), kv.data_ptr()
w += 1
say("ready"); hear()
saver.pause()
assert torch.equal(saver.get_cpu_backup(w), torch.arange(4 * MIB, dtype=torch.float32) + 1)
say("paused"); hear()
saver.resume("weights")
saver.resume("weights")
assert torch.equal(w, torch.arange(4 * MIB, dtype=torch.float32) + 1)
saver.resume()
kv.fill_(3)
assert at == (w.data_ptr(), kv.data_ptr())
say("done")
""",
        PYMUX_JOB="sampler",
    )
    assert hear(a) == "ready"
    b = node.start(
        """
mux = pymux.connect("trainer")
region = mux.region("all")
with mux.phase("train"):
    block = region.allocate(31 * PAGE)
    fill(block, 9)
    say("trained")
with mux.phase("train"): check(block, 9)
say("again")
"""
    )
    say(a)
    assert hear(a) == "paused"
    assert hear(b) == "trained"
    assert hear(b) == "again"
    say(a)
    assert hear(a) == "done"


def test_a_tag_is_paused_while_others_are_in_use(node):
    node.run(
        SETUP
        + """
with saver.region(tag="weights", enable_cpu_backup=True): w = torch.full((8 * MIB,), 7, dtype=torch.uint8)
with saver.region(tag="kv_cache"): kv = torch.full((16 * MIB,), 7, dtype=torch.uint8)
saver.pause("kv_cache")
saver.pause("kv_cache")
assert held() == 4
assert int(w.sum(dtype=torch.int64)) == 7 * 8 * MIB, "in use"
del kv  # freed while it is away
with saver.region(tag="kv_cache"): kv = torch.full((4 * MIB,), 5, dtype=torch.uint8)  # and allocated again
assert int(kv.sum(dtype=torch.int64)) == 5 * 4 * MIB
saver.pause("nothing"); saver.resume("nothing")
"""
    )


def test_allocations_can_leave_the_region_for_a_while(node):
    node.run(
        SETUP
        + """
inside = lambda t: saver._mux.region_of(t.data_ptr()) is not None
with saver.region(tag="a"):
    a = torch.empty(1000)
    with saver.disable():
        b = torch.empty(1000)
        with saver.region(tag="b"): c = torch.empty(1000)
        d = torch.empty(1000)
    e = torch.empty(1000)
f = torch.empty(1000)
assert [inside(t) for t in (a, b, c, d, e, f)] == [True, False, True, False, True, False]
assert saver._mux.region_of(e.data_ptr()).name == "a"
"""
    )


def test_the_environment_begins_a_region_for_the_process(node):
    node.run(
        SETUP
        + """
x = torch.full((MIB,), 4, dtype=torch.uint8)
saver.pause()
assert held() == 0
saver.resume()
assert int(x.sum(dtype=torch.int64)) == 4 * MIB
""",
        TMS_INIT_ENABLE="1",
        TMS_INIT_ENABLE_CPU_BACKUP="1",
    )


def test_what_cannot_be_is_said(node):
    out = node.run(
        SETUP
        + """
for options in ({"enable_cpu_backup": True, "enable_disk_backup": True}, {"cpu_backup_backend": "mmap"}):
    try:
        with saver.region(**options): pass
    except ValueError as e: say(e)
try: saver.get_cpu_backup(torch.empty(3))
except ValueError as e: say(e)
with saver.region(): x = torch.empty(MIB)
saver.pause()
try: saver.get_cpu_backup(x)
except pymux.ContentsLost as e: say("lost")
saver.hook_mode = "torch"
saver.memory_margin_bytes = 1 << 30
with torch_memory_saver.configure_subprocess(): pass
try:
    with saver.cuda_graph(None): pass
except pymux.DriverError as e: say(e)
"""
    )
    assert len(out.splitlines()) == 5


def test_install_comes_before_the_other_module(node):
    out = node.run(
        """
import sys, types
sys.modules["torch_memory_saver"] = types.ModuleType("torch_memory_saver")
import pymux.compat.torch_memory_saver as compat
try: compat.install()
except pymux.PymuxError as e: say(e)
"""
    )
    assert "install() first" in out


def test_cupy_arrays_lie_in_the_region_and_are_used_again_in_stream_order(node):
    pytest.importorskip("cupy", reason="CuPy is not installed")
    node.run(
        """
import types
import cupy
import pymux.cupy
cupy.cuda.get_current_stream = lambda: types.SimpleNamespace(ptr=0)  # asking needs a GPU
mux = pymux.connect("a")
region = mux.region("arrays")
with mux.phase("p"), cupy.cuda.using_allocator(pymux.cupy.allocator(region)):
    a = cupy.ndarray((MIB,), dtype="u1")
    assert region.contains(a.data.ptr)
    view, at = a[5:], a.data.ptr
    del a
    b = cupy.ndarray((MIB,), dtype="u1")
    assert b.data.ptr != at, "the view still uses it"
    del view
    assert cupy.ndarray((MIB,), dtype="u1").data.ptr == at
    assert cupy.ndarray((0,), dtype="u1").nbytes == 0
"""
    )
