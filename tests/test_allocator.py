"""The allocator that replaces torch's, through the functions that torch calls."""

import subprocess

import pytest

from tests.conftest import ROOT, hear, say

SETUP = """
import threading
from pymux import _core
mux = pymux.connect(os.environ.get("NAME", "a"))
region = mux.region("default")
_core.torch_install(region.agent, region.core)
lib, helper = ctypes.CDLL(_core.__file__), ctypes.CDLL(os.environ["HELPER"])
cuda = ctypes.CDLL(_core.load_driver("sim"))
helper.call_allocate.restype = ctypes.c_void_p
P, u64 = ctypes.c_void_p, ctypes.c_uint64
def allocate(size, stream=None):
    error = ctypes.create_string_buffer(500)
    room = ctypes.c_size_t(len(error))
    p = helper.call_allocate(lib.pymux_torch_allocate, ctypes.c_ssize_t(size), 0, P(stream), error, room)
    if p is None: raise MemoryError(error.value.decode())
    return p
def free(p): lib.pymux_torch_free(P(p), ctypes.c_ssize_t(0), 0, None)
def use(p, stream): lib.pymux_torch_record_stream(P(p), P(stream))
def stats(): return _core.torch_stats(region.core)
def stream():
    s = P()
    assert cuda.cuStreamCreate(ctypes.byref(s), 1) == 0
    return s.value
def context():
    c = P()
    assert cuda.cuDevicePrimaryCtxRetain(ctypes.byref(c), 0) == 0 and cuda.cuCtxSetCurrent(c) == 0
context()
"""


@pytest.fixture(scope="module")
def helper(tmp_path_factory):
    out = tmp_path_factory.mktemp("helper") / "calls.so"
    source = ROOT / "tests" / "allocator_calls.cpp"
    subprocess.run(["g++", "-std=c++20", "-shared", "-fPIC", "-o", out, source], check=True)
    return str(out)


def test_a_freed_block_serves_its_own_stream_at_once_and_others_after_the_device(node, helper):
    node.run(
        SETUP
        + """
with mux.phase("p"):
    s, t = stream(), stream()
    a = allocate(MIB, s); free(a)
    b = allocate(MIB, t)
    assert b != a, "the other stream may still use it"
    assert allocate(MIB - 1, s) == a, "sizes are rounded"
    free(a); free(b)
    c = allocate(2 * MIB, s)
    assert c not in (a, b)
    free(c)
    _core.torch_empty_cache()
    assert stats()["cached_bytes"] == 0 and region.core.live_bytes == 0
    assert allocate(3 * MIB, t) == min(a, b, c), "joined again"
""",
        HELPER=helper,
    )


def test_a_block_that_another_stream_uses_is_not_used_again_before_that_is_done(node_factory, helper):
    node_factory(PYMUX_SIM_LINK="2e7").run(
        SETUP
        + """
with mux.phase("p"):
    s, t = stream(), stream()
    host = P()
    assert cuda.cuMemHostAlloc(ctypes.byref(host), ctypes.c_size_t(8 * MIB), 0) == 0  # else the call waits itself
    a = allocate(8 * MIB, s)
    assert cuda.cuMemcpyHtoDAsync_v2(u64(a), host, ctypes.c_size_t(8 * MIB), P(t)) == 0  # 0.4 s
    use(a, t); use(a, s); free(a)
    assert stats()["pending_bytes"] == 8 * MIB
    b = allocate(8 * MIB, s)
    assert b != a
    assert cuda.cuStreamSynchronize(P(t)) == 0
    free(b)
    allocate(512, t)
    assert stats()["pending_bytes"] == 0
    free(allocate(4 * MIB, t))
""",
        HELPER=helper,
    )


def test_what_a_capture_has_had_stays_with_its_pool_until_that_is_released(node, helper):
    node.run(
        SETUP
        + """
with mux.phase("p"):
    s, t = stream(), stream()
    before = allocate(MIB, s); free(before)
    helper.call_begin_pool(lib.pymux_torch_begin_pool, ctypes.c_ulonglong(7), P(s))
    a = allocate(MIB, s)
    assert a != before, "nothing from outside gets into a graph"
    other = allocate(MIB, t); use(other, s); free(other)
    free(a)
    assert allocate(MIB, s) == a, "within the capture it is used again"
    free(a)
    helper.call_with_pool(lib.pymux_torch_end_pool, ctypes.c_ulonglong(7))
    assert allocate(MIB, s) == before
    _core.torch_empty_cache()
    assert region.core.live_bytes == 2 * MIB, "the pool keeps its block: the graph will write to it"
    ctypes.memset(a, 3, MIB)
mux.evict()
with mux.phase("p"):
    assert ctypes.string_at(a, MIB) == b"\\3" * MIB
    helper.call_with_pool(lib.pymux_torch_release_pool, ctypes.c_ulonglong(7))
    _core.torch_empty_cache()
    assert region.core.live_bytes == MIB
""",
        HELPER=helper,
    )


def test_out_of_memory_gives_the_cache_up_first_and_then_says_so(node, helper):
    out = node.run(
        SETUP
        + """
with mux.phase("p"):
    s, t = stream(), stream()
    for _ in range(2):
        free(allocate(40 * MIB, s))
        free(allocate(41 * MIB, t))
    kept = allocate(30 * MIB, s)
    try: allocate(40 * MIB, s)
    except MemoryError as e: say(e)
    ctypes.memset(kept, 1, 30 * MIB)
    free(kept)
    free(allocate(60 * MIB, s))
""",
        HELPER=helper,
    )
    assert out.startswith("CUDA out of memory. pymux: ")


def test_frees_find_their_region_from_any_thread_resident_or_not(node, helper):
    node.run(
        SETUP
        + """
other = mux.region("weights")
with mux.phase("p"):
    a = allocate(3 * MIB)
    with other.serving_torch_allocator():
        w = allocate(5 * MIB)
    assert region.contains(a) and other.contains(w), "a region block still decides"
    ctypes.memset(w, 5, 5 * MIB)
mux.evict()
threads = [threading.Thread(target=free, args=(a,))]
for t in threads: t.start()
for t in threads: t.join()
assert stats()["allocated_bytes"] == 0
assert mux.stats()["regions"]["weights"]["live_bytes"] == 5 * MIB
with mux.phase("p"):
    assert ctypes.string_at(w, 5 * MIB) == b"\\5" * (5 * MIB)
    free(w)
free(1 << 40)  # of nobody: torch's own
""",
        HELPER=helper,
    )


def test_an_allocation_outside_a_phase_keeps_the_device_until_the_next_phase(node, helper):
    a = node.start(
        SETUP
        + """
p = allocate(MIB)
ctypes.memset(p, 1, MIB)
assert mux.active
say("allocated"); hear()
with mux.phase("p"): pass
assert not mux.active
say("left"); hear()
q = allocate(MIB)
mux.evict()
assert ctypes.string_at(0, 0) == b"" and not mux.active
say("evicted")
""",
        HELPER=helper,
    )
    assert hear(a) == "allocated"
    b = node.start(
        """
mux = pymux.connect("b")
for timeout in (0.2, 20):
    try:
        with mux.phase("p", timeout=timeout): say("in")
    except pymux.AcquireTimeout: say("timeout")
"""
    )
    assert hear(b) == "timeout"
    say(a)
    assert hear(a) == "left"
    assert hear(b) == "in"
    say(a)
    assert hear(a) == "evicted"


@pytest.mark.slow
def test_a_small_block_needs_no_further_page_while_there_is_room_beside_others(node):
    node.run("""
KIB = 1 << 10
with pymux.connect("a") as mux, mux.phase("p"):
    region = mux.region("default")
    first, hole, last = (region.allocate(size) for size in (4 * MIB, 4 * MIB, 3 * MIB))
    start, between = first.ptr, hole.ptr
    assert (between, last.ptr) == (start + 4 * MIB, start + 8 * MIB)
    del hole
    # The hole fits best, and is two pages without a block; the page that `last` ends in has 1 MiB left.
    beside = [region.allocate(512 * KIB) for _ in range(2)]
    assert [b.ptr - start for b in beside] == [11 * MIB, 11 * MIB + 512 * KIB]
    opened = region.allocate(512 * KIB)
    assert opened.ptr == between, "no room beside others: the best fit"
    large = region.allocate(2 * MIB)
    assert large.ptr == between + 512 * KIB, "a block of a page or more goes where it fits best"
    del beside[0]
    assert region.allocate(256 * KIB).ptr == start + 11 * MIB
""")


def test_no_live_blocks_overlap_whatever_is_done(node, helper):
    node.run(
        SETUP
        + """
from hypothesis import given, settings, strategies as st
steps = st.lists(st.tuples(st.sampled_from("aaaffue"), st.integers(0, 2), st.integers(1, 3 * MIB)), max_size=60)
with mux.phase("p"):
    streams = [stream() for _ in range(3)]
    @settings(max_examples=150, deadline=None, derandomize=True)
    @given(steps)
    def play(todo):
        live = {}
        for what, which, n in todo:
            if what == "a":
                p = allocate(n, streams[which])
                assert all(p + n <= q or q + m <= p for q, m in live.items())
                live[p] = n
            elif what == "f" and live:
                p = sorted(live)[n % len(live)]
                del live[p]
                free(p)
            elif what == "u" and live:
                use(sorted(live)[n % len(live)], streams[which])
            elif what == "e":
                _core.torch_empty_cache()
        assert stats()["allocated_bytes"] == sum(live.values())
        for p in live: free(p)
        _core.torch_empty_cache()
        assert region.core.live_bytes == 0 == stats()["cached_bytes"] + stats()["pending_bytes"]
    play()
""",
        HELPER=helper,
    )


def test_install_says_what_it_cannot_do_without_cuda(node):
    out = node.run(
        """
import warnings
import pymux.torch
with warnings.catch_warnings(record=True) as told:
    warnings.simplefilter("always")
    region = pymux.torch.install()
say(f"{region.mux.job} {region.name} {[str(w.message) for w in told if 'no CUDA' in str(w.message)]}")
say(pymux.torch.memory_stats(region)["reserved_bytes"])
""",
        PYMUX_JOB="trainer",
    )
    assert out.startswith("trainer default")
    assert "this torch has no CUDA" in out
    assert out.splitlines()[1] == "0"


def test_install_refuses_expandable_segments(node):
    out = node.run(
        """
import pymux.torch
try: pymux.torch.install()
except pymux.RegionError as e: say(e)
""",
        PYTORCH_CUDA_ALLOC_CONF="expandable_segments:True",
    )
    assert "PYTORCH_CUDA_ALLOC_CONF" in out
