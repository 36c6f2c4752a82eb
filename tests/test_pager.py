"""Which bytes move, which do not, and when: one process, or two clients within one."""

import contextlib
import gc
import os
import threading
import time

import pytest

import pymux
from tests.conftest import MIB, PAGE, ROOT

PAGES = 6


def put(block, byte):
    view = memoryview(block)
    view[:] = bytes([byte]) * len(view)


def holds(block, byte):
    view = memoryview(block)
    return bytes(view) == bytes([byte]) * len(view)


def read(region, block):
    out = bytearray(block.size)
    region.read(block.ptr, out)
    return bytes(out)


def figures(mux, region):
    return mux.stats()["regions"][region]


def until(condition, seconds=60.0):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not within {seconds} s"
        time.sleep(0.005)


def client(job, regions, *, byte=1, **options):
    """A connected client with so many pages in each region, filled with a byte."""
    mux = pymux.connect(job)
    blocks = {}
    for name, pages in regions.items():
        region = mux.region(name, **options.get(name, {}))
        with mux.phase("init", uses=(name,)):
            blocks[name] = region.allocate(pages * PAGE)
            put(blocks[name], byte)
    return mux, blocks


@pytest.fixture
def pair():
    """Makes two clients that share the device of 32 pages, and closes them."""
    with contextlib.ExitStack() as stack:

        def make(first, second, **options):
            a = client("a", first, **options)
            b = client("b", second, byte=2, **options)
            for mux, _ in (a, b):
                stack.enter_context(mux)
            return a, b

        yield make


@pytest.fixture
def mux():
    with pymux.connect("test") as m:
        yield m


class Waiter(threading.Thread):
    """Enters a phase in a thread, and leaves it when told to."""

    def __init__(self, mux, **options):
        super().__init__()
        self.mux, self.options = mux, options
        self.entered, self.go, self.error = threading.Event(), threading.Event(), None
        self.start()

    def run(self):
        try:
            with self.mux.phase("next", **self.options):
                self.entered.set()
                self.go.wait(20)
        except pymux.PymuxError as e:
            self.error = e

    def finish(self):
        self.go.set()
        self.join(20)
        assert not self.is_alive()
        assert self.error is None


def turn(mux, blocks, byte, **options):
    with mux.phase("turn", **options):
        for block in blocks.values():
            put(block, byte)


# ---- write-back -----------------------------------------------------------------------------


def test_pages_that_are_taken_at_every_turn_are_written_back_before_they_are(pair):
    (a, of_a), (b, of_b) = pair({"w": 20}, {"w": 20})
    for i in range(4):
        turn(a, of_a, i)
        until(lambda: figures(a, "w")["clean_bytes"] >= 8 * PAGE)
        turn(b, of_b, 10 + i)
        until(lambda: figures(b, "w")["clean_bytes"] >= 8 * PAGE)
    r = figures(a, "w")
    assert r["written_back_bytes"] > 0
    assert r["swapped_out_bytes"] - r["written_back_bytes"] == 8 * PAGE, "but for the first, nothing on demand"
    assert read(a.region("w"), of_a["w"]) == bytes([3]) * 20 * PAGE


def test_when_both_fit_nothing_is_written_back(pair):
    (a, of_a), (b, of_b) = pair({"w": 8}, {"w": 8})
    for i in range(4):
        turn(a, of_a, i)
        turn(b, of_b, i)
        time.sleep(0.02)
    assert figures(a, "w")["swapped_out_bytes"] == figures(b, "w")["swapped_out_bytes"] == 0


def test_a_page_written_again_during_its_write_back_stays_dirty(node_factory):
    """On a link so slow that the next phase begins while pages are being written back."""
    node = node_factory("40M", PYMUX_SIM_LINK="100e6")
    out = node.run(
        """
a, b = pymux.connect("a"), pymux.connect("b")
def block(m):
    with m.phase("init"): x = m.region("w").allocate(12 * PAGE); fill(x, 1)
    return x
of_a, of_b = block(a), block(b)
def turn(m, x, byte):
    with m.phase("t"): fill(x, byte)
turn(a, of_a, 2); turn(b, of_b, 2); turn(a, of_a, 3); turn(b, of_b, 3)
raced = 0
for i in range(4, 14):
    turn(a, of_a, i)
    time.sleep(0.02 + 0.003 * i)  # a write-back of 8 pages takes 170 ms
    with a.phase("again"):
        raced += a.stats()["regions"]["w"]["written_back_bytes"] > 0
        fill(of_a, 100 + i)
    turn(b, of_b, i)
    with a.phase("look", writes=()): check(of_a, 100 + i)
    with b.phase("look", writes=()): check(of_b, i)
say(raced)
"""
    )
    assert int(out) > 0


def test_write_back_within_a_phase_saves_what_it_does_not_write(pair):
    (a, of_a), (b, of_b) = pair({"w": 8, "opt": 12}, {"w": 20})
    for i in range(3):
        turn(a, of_a, i)
        turn(b, of_b, i)
    with a.phase("train"):
        for block in of_a.values():
            put(block, 9)
    with a.phase("rollout", uses=("w",), writes=()):  # some of "w" may have been saved before it began
        until(lambda: figures(a, "opt")["clean_bytes"] + figures(a, "w")["clean_bytes"] >= 8 * PAGE)
    turn(b, of_b, 3)
    assert read(a.region("opt"), of_a["opt"]) == bytes([9]) * 12 * PAGE


def test_done_with_lets_a_region_be_written_back_inside_the_phase(pair):
    (a, of_a), (b, of_b) = pair({"w": 8, "opt": 12}, {"w": 20})
    for i in range(3):
        turn(a, of_a, i)
        turn(b, of_b, i)
    with a.phase("train") as lease:
        put(of_a["opt"], 5)
        lease.done_with("opt")
        until(lambda: figures(a, "opt")["clean_bytes"] >= 8 * PAGE)
        put(of_a["w"], 6)
        waiter = Waiter(b)
        until(lambda: b.stats()["pages_held"] >= 20)  # the optimizer's pages, during a's phase
        assert not waiter.entered.is_set()
    waiter.finish()
    assert read(a.region("opt"), of_a["opt"]) == bytes([5]) * 12 * PAGE
    assert read(a.region("w"), of_a["w"]) == bytes([6]) * 8 * PAGE


# ---- partial eviction and prefetch ------------------------------------------------------------


def test_the_next_in_the_queue_fills_free_pages_while_the_holder_computes(pair):
    (a, of_a), (b, of_b) = pair({"w": 20}, {"w": 20})
    turn(a, of_a, 1)
    turn(b, of_b, 2)
    turn(a, of_a, 3)  # b lacks 8 of its pages now
    with a.phase("short", uses=()):
        waiter = Waiter(b)
        until(lambda: figures(b, "w")["resident_bytes"] == 20 * PAGE)
        assert not waiter.entered.is_set()
        assert figures(b, "w")["prefetched_bytes"] >= 8 * PAGE
    waiter.finish()


def test_a_running_phase_keeps_what_it_uses(pair):
    (a, of_a), (b, _) = pair({"w": 20}, {"w": 20})
    with a.phase("long"):
        waiter = Waiter(b)
        until(lambda: b.stats()["phase"] == "waiting")
        time.sleep(0.1)
        assert figures(a, "w")["resident_bytes"] == 20 * PAGE
        put(of_a["w"], 4)
    waiter.finish()
    assert read(a.region("w"), of_a["w"]) == bytes([4]) * 20 * PAGE


def test_clean_pages_go_before_dirty_ones(pair):
    (a, of_a), (b, of_b) = pair({"frozen": 10, "opt": 10}, {"w": 20}, frozen={"frozen": True})
    for i in range(3):
        turn(a, {"opt": of_a["opt"]}, i)
        turn(b, of_b, i)

    def on_demand():  # what is written back in the background goes on for a while
        opt = figures(a, "opt")
        return opt["swapped_out_bytes"] - opt["written_back_bytes"]

    before = on_demand()
    turn(a, {"opt": of_a["opt"]}, 7)
    turn(b, of_b, 7)  # takes 8 pages: the frozen region's
    assert on_demand() == before
    assert figures(a, "frozen")["avoided_clean_bytes"] > 0
    assert read(a.region("frozen"), of_a["frozen"]) == bytes([1]) * 10 * PAGE


# ---- demand order -----------------------------------------------------------------------------


def test_the_body_begins_before_a_lazy_region_is_there_and_require_waits_for_it(node_factory):
    node = node_factory("64M", PYMUX_SIM_LINK="200e6")
    node.run(
        """
mux = pymux.connect("lazy")
w, opt = mux.region("w"), mux.region("opt")
with mux.phase("init"):
    a, b = w.allocate(2 * PAGE), opt.allocate(20 * PAGE)
    fill(a, 1); fill(b, 2)
mux.evict()
with mux.phase("train", uses=("w",), lazy=("opt",)) as lease:
    check(a, 1)
    begun = mux.stats()["regions"]["opt"]["resident_bytes"]
    assert begun < 20 * PAGE, "the body waited for it"
    lease.require("opt")
    check(b, 2); fill(b, 3)
    assert mux.stats()["regions"]["opt"]["streamed_bytes"] > 0
mux.evict()
with mux.phase("look", uses=("opt",)): check(b, 3)
"""
    )


def test_regions_come_in_in_the_order_named(node_factory):
    node = node_factory("64M", PYMUX_SIM_LINK="200e6")
    node.run(
        """
mux = pymux.connect("order")
blocks = {}
with mux.phase("init"):
    for n in "abc": blocks[n] = mux.region(n).allocate(6 * PAGE); fill(blocks[n], 1)
mux.evict()
with mux.phase("use", uses=(), lazy=("c", "a", "b")) as lease:
    for n, later in (("c", "ab"), ("a", "b")):
        lease.require(n)
        check(blocks[n], 1)
        assert all(mux.stats()["regions"][x]["resident_bytes"] < 6 * PAGE for x in later), n
"""
    )


def test_a_phase_that_ends_before_its_lazy_region_came_needs_it_no_more(mux):
    block = {}
    for n in ("w", "opt"):
        with mux.phase("init", uses=(n,) if n in mux.regions else None):
            block[n] = mux.region(n).allocate(4 * PAGE)
            put(block[n], 3)
    mux.evict()
    for _ in range(5):
        with mux.phase("short", uses=("w",), lazy=("opt",), writes=()):
            pass
        mux.evict()
    with mux.phase("look", writes=()):
        assert holds(block["opt"], 3)


def test_require_and_done_with_say_what_is_wrong(mux):
    mux.region("w")
    mux.region("other")
    with mux.phase("p", uses=("w",)) as lease:
        with pytest.raises(pymux.UnknownRegion, match="does not use region 'other'"):
            lease.require("other")
        with pytest.raises(pymux.UnknownRegion, match="no region 'wieghts'"):
            lease.done_with("wieghts")
    with pytest.raises(pymux.LeaseError, match="after phase 'p' ended"):
        lease.done_with("w")


# ---- live ranges ------------------------------------------------------------------------------


def test_only_live_ranges_move_and_survive(mux):
    region = mux.region("kv")
    with mux.phase("fill"):
        block = region.allocate(4 * PAGE)
        put(block, 7)
        start = block.ptr - region.base
        live = [(start, 100), (start + PAGE + 1000, 5000), (start + 3 * PAGE - 64, 128)]
        region.set_live(live)
    mux.evict()
    r = figures(mux, "kv")
    assert r["swapped_out_bytes"] <= sum(n for _, n in live) + 8 * 128
    assert r["avoided_not_live_bytes"] == 4 * PAGE - r["swapped_out_bytes"]
    with mux.phase("use"):
        contents = bytes(memoryview(block))
    for offset, size in live:
        assert contents[offset - start : offset - start + size] == bytes([7]) * size


def test_a_page_without_live_contents_is_given_away_as_it_is(mux):
    region = mux.region("kv")
    with mux.phase("fill"):
        block = region.allocate(4 * PAGE)
        region.set_live([])
    mux.evict()
    r = figures(mux, "kv")
    assert r["swapped_out_bytes"] == 0
    assert r["avoided_not_live_bytes"] == 4 * PAGE
    assert r["lost_bytes"] == 0, "it was said that they need not survive"
    with mux.phase("use"):
        put(block, 1)
    mux.evict()
    assert figures(mux, "kv")["swapped_out_bytes"] == 0


def test_what_becomes_live_is_copied_although_the_page_had_a_clean_copy(mux):
    region = mux.region("kv")
    with mux.phase("fill"):
        block = region.allocate(PAGE)
        put(block, 5)
        start = block.ptr - region.base
        region.set_live([(start, 1024)])
    mux.evict()
    with mux.phase("look", writes=()):
        pass
    with mux.phase("more", writes=()):
        memoryview(block)[4096:8192] = bytes([6]) * 4096
        region.set_live([(start, 1024), (start + 4096, 4096)])
    mux.evict()
    got = read(region, block)
    assert got[:1024] == bytes([5]) * 1024
    assert got[4096:8192] == bytes([6]) * 4096


def test_blocks_allocated_after_set_live_are_live(mux):
    region = mux.region("kv")
    with mux.phase("fill"):
        first = region.allocate(PAGE)
        region.set_live([])
        second = region.allocate(PAGE)
        put(second, 9)
    mux.evict()
    assert read(region, second) == bytes([9]) * PAGE
    region.set_live(None)
    del first


def test_a_range_outside_the_region_is_refused(mux):
    with pytest.raises(pymux.RegionError, match=r"region\.base"):
        mux.region("kv").set_live([(mux.region("kv").base, 10)])


# ---- what is known to be unchanged --------------------------------------------------------------


def test_a_frozen_region_is_copied_out_once(mux):
    region = mux.region("base", frozen=True)
    with region:
        block = region.allocate(4 * PAGE)
        put(block, 8)
    for _ in range(3):
        mux.evict()
        with mux.phase("use"):
            assert holds(block, 8)
    assert figures(mux, "base")["swapped_out_bytes"] == 4 * PAGE


def test_a_frozen_region_in_writes_is_refused(mux):
    mux.region("base", frozen=True)
    with pytest.raises(pymux.FrozenRegion, match="writes="):
        with mux.phase("train", writes=("base",)):
            pass
    with pytest.raises(pymux.RegionError, match="frozen"):
        mux.region("base", frozen=False)


def test_fingerprints_find_the_pages_that_a_phase_left_as_they_were(mux):
    region = mux.region("opt", track="fingerprint")
    with mux.phase("init"):
        block = region.allocate(PAGES * PAGE)
        put(block, 1)
    mux.evict()
    first = figures(mux, "opt")["swapped_out_bytes"]
    assert first == PAGES * PAGE
    with mux.phase("train"):
        memoryview(block)[2 * PAGE + 5 : 2 * PAGE + 6] = b"x"
    assert figures(mux, "opt")["clean_bytes"] == (PAGES - 1) * PAGE
    mux.evict()
    r = figures(mux, "opt")
    assert r["swapped_out_bytes"] - first == PAGE
    assert r["avoided_unchanged_bytes"] == (PAGES - 1) * PAGE
    assert read(region, block)[2 * PAGE + 4 : 2 * PAGE + 7] == b"\x01x\x01"


def test_without_a_kernel_a_fingerprinted_region_is_dirty(mux, cuda):
    cuda.fail_nth("cuModuleLoadData", 1, 200, forever=True)  # CUDA_ERROR_INVALID_IMAGE
    try:
        region = mux.region("opt", track="fingerprint")
        with mux.phase("init"):
            block = region.allocate(2 * PAGE)
            put(block, 1)
        mux.evict()
        with mux.phase("train"):
            put(block, 2)
        assert figures(mux, "opt")["dirty_bytes"] == 2 * PAGE
        assert mux.stats()["fingerprints"] is False
        mux.evict()
        assert read(region, block) == bytes([2]) * 2 * PAGE
    finally:
        cuda.fail_nth("cuModuleLoadData", 0, 0)


# ---- host memory --------------------------------------------------------------------------------


def test_the_backing_store_grows_before_it_is_needed(pair):
    (a, of_a), (b, of_b) = pair({"w": 10}, {"w": 4})  # noqa: RUF059 - the blocks stay alive
    until(lambda: a.stats()["host_pinned_bytes"] >= 10 * PAGE)
    assert figures(a, "w")["swapped_out_bytes"] == 0


def test_a_client_that_shares_with_nobody_pins_nothing(node):
    out = node.run(
        """
mux = pymux.connect("alone")
with mux.phase("init"): block = mux.region("w").allocate(10 * PAGE)
time.sleep(0.3)
say(mux.stats()["host_pinned_bytes"])
"""
    )
    assert out.strip() == "0"


def test_host_memory_is_registered_once_and_not_per_swap(mux, cuda):
    with mux.phase("init"):
        block = mux.region("w").allocate(PAGES * PAGE)
        put(block, 1)
    mux.evict()
    registered = cuda.counts()["registrations"]
    cuda.fail_nth("cuMemHostRegister", 1, 999, forever=True)
    try:
        for i in range(3):
            with mux.phase("use"):
                put(block, i)
            mux.evict()
    finally:
        cuda.fail_nth("cuMemHostRegister", 0, 0)
    assert cuda.counts()["registrations"] == registered


def test_evict_returns_when_the_memory_is_free_and_says_how_much(pair):
    (a, of_a), (b, _) = pair({"w": 20}, {"w": 4})
    assert a.evict() == of_a["w"].size
    assert a.evict() == 0
    with b.phase("grow"):
        more = b.region("more").allocate(28 * PAGE)  # all there is besides
        put(more, 3)
    assert figures(a, "w")["resident_bytes"] == 0
    assert figures(b, "w")["resident_bytes"] == 4 * PAGE


def test_only_those_wait_for_a_swap_who_need_it(node_factory):
    node = node_factory("64M", PYMUX_SIM_LINK="100e6")
    out = node.run(
        """
import threading
mux, other = pymux.connect("slow"), pymux.connect("other")
with mux.phase("init"): block = mux.region("w").allocate(20 * PAGE); fill(block, 1)
with other.phase("init"): small = other.region("w").allocate(PAGE); fill(small, 2)
swap = threading.Thread(target=mux.evict)  # 400 ms of link
swap.start()
worst = turns = 0
while swap.is_alive():
    began = time.monotonic()
    mux.stats(); repr(mux)
    with other.phase("quick"): fill(small, turns % 256)
    worst, turns = max(worst, time.monotonic() - began), turns + 1
    time.sleep(0.002)
say(f"{turns} {worst:.3f}")
"""
    )
    turns, worst = out.split()
    assert int(turns) > 3, "a swap that blocks leaves one or two"
    assert float(worst) < 0.2


def test_a_swap_in_that_finds_no_device_memory_raises_and_a_later_one_succeeds(node_factory):
    node = node_factory("32M")
    out = node.run(
        """
from pymux import _core
from tests.cuda_types import prop
mux = pymux.connect("squeezed")
with mux.phase("init"): block = mux.region("w").allocate(12 * PAGE); fill(block, 5)
mux.evict()
lib, u64 = ctypes.CDLL(_core.load_driver("sim")), ctypes.c_uint64
taken = []
while True:  # somebody outside pymux takes what is there
    h = u64()
    if lib.cuMemCreate(ctypes.byref(h), ctypes.c_size_t(PAGE), ctypes.byref(prop()), u64(0)): break
    taken.append(h)
try:
    with mux.phase("use"): pass
except pymux.DeviceOutOfMemory as e: say(e)
s = mux.stats()
assert s["phase"] == "idle" and s["regions"]["w"]["evicted_bytes"] == 12 * PAGE, s
for h in taken: assert lib.cuMemRelease(h) == 0
with mux.phase("use"): check(block, 5)
""",
        PYTHONPATH=os.pathsep.join([*filter(None, [os.environ.get("PYTHONPATH")]), str(ROOT)]),  # for tests.cuda_types
        PYMUX_PASS_PAGES="0",
    )
    assert "something outside pymux has taken it" in out


def test_host_memory_stays_pinned_until_it_is_trimmed_and_the_figures_show_it(mux):
    with mux.phase("init"):
        block = mux.region("w").allocate(20 * PAGE)
        put(block, 1)
    mux.evict()
    used = mux.stats()
    assert used["host_used_bytes"] == 20 * PAGE
    assert used["host_used_bytes"] <= used["host_pinned_bytes"] <= used["host_used_bytes"] + 16 * PAGE
    with mux.phase("back", writes=()):
        pass
    assert mux.stats()["host_pinned_bytes"] == used["host_pinned_bytes"], "kept for the next swap"
    del block
    gc.collect()
    mux.evict()
    released = mux.trim_host()
    assert released == used["host_pinned_bytes"]
    assert mux.stats()["host_pinned_bytes"] == 0


SPILLING = """
mux = pymux.connect("spilling")
region = mux.region("w")
with mux.phase("init"):
    blocks = [region.allocate(PAGE) for _ in range(28)]
    for i, b in enumerate(blocks): fill(b, i)
def whole():
    out = bytearray(PAGE)
    for i, b in enumerate(blocks):
        region.read(b.ptr, out)
        assert out == bytes([i]) * PAGE, i
"""


def test_beyond_the_host_budget_pages_go_to_the_spill_file_and_come_back(node_factory, tmp_path):
    node = node_factory("64M", PYMUX_HOST_BUDGET="32M", PYMUX_SPILL_DIR=str(tmp_path))
    out = node.run(
        SPILLING
        + """
for turn in range(3):
    mux.evict()
    r = mux.stats()["regions"]["w"]
    assert r["evicted_bytes"] == 28 * PAGE and r["resident_bytes"] == 0, r
    assert r["spilled_bytes"] == 20 * PAGE, r  # 16 slots, of which 8 are for passing through
    whole()
    with mux.phase("use", writes=() if turn == 1 else None):
        for i, b in enumerate(blocks): check(b, i)
assert mux.stats()["regions"]["w"]["swapped_out_bytes"] == 2 * 28 * PAGE  # once without a copy
s = mux.stats()
say(s["host_pinned_bytes"] // MIB)
"""
    )
    assert out.strip() == "32"
    assert not list(tmp_path.iterdir()), "the file has no name"


def test_a_full_spill_disk_keeps_the_pages_on_the_device_and_says_so(node_factory, tmp_path):
    node = node_factory("64M", PYMUX_HOST_BUDGET="32M", PYMUX_SPILL_DIR=str(tmp_path))
    out = node.run(
        "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (32 * 2**20, resource.RLIM_INFINITY))\n"
        + SPILLING
        + """
for _ in range(2):
    try: mux.evict()
    except pymux.HostOutOfMemory as e: say(e)
    r = mux.stats()["regions"]["w"]
    assert r["evicted_bytes"] == 24 * PAGE and r["resident_bytes"] == 4 * PAGE, r
    whole()
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
mux.evict()
assert mux.stats()["regions"]["w"]["resident_bytes"] == 0
whole()
with mux.phase("use"):
    for i, b in enumerate(blocks): check(b, i)
"""
    )
    assert out.count("spill directory") == 2


def test_without_a_spill_file_the_host_budget_is_said_and_the_pages_stay(node_factory):
    node = node_factory("64M", PYMUX_HOST_BUDGET="32M")
    out = node.run(
        SPILLING
        + """
try: mux.evict()
except pymux.HostOutOfMemory as e: say(e)
assert mux.stats()["regions"]["w"]["evicted_bytes"] == 16 * PAGE
whole()
with mux.phase("use"):
    for i, b in enumerate(blocks): check(b, i)
"""
    )
    assert "--host-budget" in out
    assert "--spill-dir" in out


def test_what_one_client_trims_another_may_have(node_factory):
    node = node_factory("64M", PYMUX_HOST_BUDGET="32M")
    node.run(
        """
import gc
a, b = pymux.connect("a"), pymux.connect("b")
def block(m, pages):
    with m.phase("init"): x = m.region("w").allocate(pages * PAGE); fill(x, 1)
    return x
of_a = block(a, 8); a.evict()
of_b = block(b, 8)
try: b.evict()
except pymux.HostOutOfMemory: pass
else: raise AssertionError("the budget is a's")
del of_a; gc.collect()
with a.phase("x"): pass
assert a.trim_host() == 32 * MIB
b.evict()
assert b.stats()["regions"]["w"]["evicted_bytes"] == 8 * PAGE
"""
    )


def test_the_broker_tells_the_figures_of_each_region(pair):
    from pymux import config
    from pymux.cli import _request_status

    (a, of_a), (b, of_b) = pair({"w": 10}, {"w": 4})  # noqa: RUF059 - the blocks stay alive
    a.evict()
    status = _request_status(config.load().socket)
    (client,) = [c for c in status["clients"] if c["job"] == "a"]
    assert client["regions"]["w"]["evicted_bytes"] == 10 * PAGE
    assert client["regions"]["w"]["copied_out_bytes"] == 10 * PAGE
    assert client["host_bytes"] >= 10 * PAGE
    assert status["host"]["budget_bytes"] > 100 * MIB


def test_where_both_directions_at_once_do_not_gain_they_take_turns(node_factory):
    node = node_factory("32M", PYMUX_SIM_LINK="500e6")
    node.run(
        """
from pymux import _core, config, wire
_core.load_driver("sim")
home = config.load().runtime_dir
home.mkdir(mode=0o700)
(home / f"link-{wire.device_name(_core.Device(0).uuid)}.json").write_text('{"duplex": false}')
mux = pymux.connect("simplex")
assert mux.stats()["duplex"] is False
blocks = {}
for i, n in enumerate("ab"):  # 12 pages each, and the device has 16
    with mux.region(n) as r: blocks[n] = r.allocate(12 * PAGE); fill(blocks[n], i)
for turn in range(2):
    for i, n in enumerate("ab"):
        with mux.phase("use", uses=(n,)): check(blocks[n], i)
swaps = mux.trace()["swaps"]
outs, ins = ([s for s in swaps if s["bytes"] and s["direction"] == d] for d in ("out", "in"))
assert len(outs) > 20 and len(ins) > 20
for o in outs:
    assert not any(i["begin"] < o["end"] and o["begin"] < i["end"] - 0.001 for i in ins), (o, ins)
"""
    )


def test_the_link_is_measured_once_per_device(node_factory):
    node = node_factory(PYMUX_SIM_LINK="500e6")  # far from what the machine's own memory limits
    out = node.run(
        """
from pymux import calibrate, config
from pymux import _core
_core.load_driver("sim")
first = calibrate.link(0, config.load().runtime_dir)
files = list(config.load().runtime_dir.glob("link-GPU-*.json"))
assert len(files) == 1
again = calibrate.link(0, config.load().runtime_dir)
assert first == again
files[0].write_text("{broken")
assert calibrate.link(0, config.load().runtime_dir)["duplex"] is True
say(first["both"] > 1.3 * first["out"])
"""
    )
    assert out.strip() == "True"
