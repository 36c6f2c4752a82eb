"""The API as a user meets it, in one process on the simulated device."""

import gc
import os
import signal
import threading
import time
from itertools import pairwise

import pytest

import pymux
from tests.conftest import MIB, PAGE, hear, say
from tests.test_handoff import job, order


@pytest.fixture
def mux():
    with pymux.connect("test") as m:
        yield m


def alloc(mux, region, nbytes):
    r = mux.region(region)
    with mux.phase("allocate", uses=(region,)):
        return r.allocate(nbytes)


def test_a_phase_needs_regions_that_exist(mux):
    mux.region("weights")
    with pytest.raises(pymux.UnknownRegion, match=r"no region 'weihgts'.*it has 'weights'"):
        with mux.phase("train", uses=("weihgts",)):
            pass


def test_a_phase_inside_a_phase_is_refused_and_the_outer_one_goes_on(mux):
    with mux.phase("outer"):
        with pytest.raises(pymux.LeaseError, match="inside phase 'outer'"), mux.phase("inner"):
            pass
        assert mux.active
    assert not mux.active


def test_leaving_without_a_phase_is_an_error(mux):
    with pytest.raises(pymux.LeaseError, match="no phase to leave"):
        mux._agent.leave()


def test_an_exception_in_a_phase_ends_it(mux):
    with pytest.raises(ZeroDivisionError), mux.phase("train"):
        _ = 1 / 0
    with mux.phase("train"):
        pass


def test_a_phase_decorates_a_function(mux):
    @mux.phase("train")
    def step(x):
        assert mux.active
        return x + 1

    assert [step(1), step(2)] == [2, 3]
    assert not mux.active


def test_regions_are_got_by_name_and_keep_their_policy(mux):
    kv = mux.region("kv_cache", on_evict="discard")
    assert mux.region("kv_cache") is kv
    with pytest.raises(pymux.RegionError, match="discard"):
        mux.region("kv_cache", on_evict="keep")
    with pytest.raises(pymux.ConfigError, match="on_evict"):
        mux.region("other", on_evict="forget")


def test_allocating_outside_a_phase_is_refused_with_the_remedy(mux):
    with pytest.raises(pymux.LeaseError, match="mux.phase"):
        mux.region("weights").allocate(100)


def test_odd_sizes_are_rounded_up_physically_and_kept_logically(mux):
    block = alloc(mux, "weights", 6912)
    assert block.size == 6912
    assert block.ptr % 256 == 0
    assert mux.stats()["regions"]["weights"]["resident_bytes"] == PAGE


def test_regions_never_share_pages(mux):
    a, b = alloc(mux, "a", 100), alloc(mux, "b", 100)
    assert abs(a.ptr - b.ptr) >= PAGE
    del a
    gc.collect()
    memoryview(b)
    with mux.phase("x"):
        memoryview(b)[:3] = b"abc"
    mux.evict("a")
    with mux.phase("x"):
        assert bytes(memoryview(b)[:3]) == b"abc"


def test_freed_blocks_are_used_again(mux):
    first = alloc(mux, "weights", 1000)
    at = first.ptr
    del first
    assert alloc(mux, "weights", 1000).ptr == at


def test_freeing_while_evicted_is_fine_and_its_pages_are_not_copied_again(mux):
    block = alloc(mux, "weights", 4 * PAGE)
    mux.evict()
    del block
    assert mux.stats()["regions"]["weights"]["live_bytes"] == 0
    with mux.phase("x"):
        pass
    assert mux.stats()["regions"]["weights"]["swapped_in_bytes"] == 0


def test_a_block_of_a_dead_tensors_pages_can_be_had_again_after_eviction(mux):
    block = alloc(mux, "weights", 2 * PAGE)
    mux.evict()
    del block
    with mux.phase("x"):
        again = mux.region("weights").allocate(2 * PAGE)
        memoryview(again)[:4] = b"here"
    mux.evict()
    with mux.phase("x"):
        assert bytes(memoryview(again)[:4]) == b"here"


def test_more_than_the_device_has_is_said_at_once_with_both_figures(mux):
    with mux.phase("x"):
        with pytest.raises(pymux.CapacityError, match=r"needs 66 MiB.*has 64 MiB") as e:
            mux.region("weights").allocate(65 * MIB)
        assert e.value.need == 66 * MIB
        assert e.value.limit == 64 * MIB
        assert mux.region("weights").allocate(MIB), "a smaller one still fits"
    assert isinstance(e.value, MemoryError)


def test_reading_evicted_contents_needs_no_lease(mux):
    block = alloc(mux, "weights", 2 * PAGE)
    with mux.phase("x"):
        memoryview(block)[PAGE - 2 : PAGE + 2] = b"edge"
    for _ in range(2):
        out = bytearray(4)
        mux.region("weights").read(block.ptr + PAGE - 2, out)
        assert out == b"edge"
        mux.evict()


def test_reading_discarded_contents_says_they_are_lost(mux):
    mux.region("kv", on_evict="discard")
    block = alloc(mux, "kv", 100)
    mux.evict()
    with pytest.raises(pymux.ContentsLost, match="on_evict"):
        mux.region("kv").read(block.ptr, bytearray(4))


def test_evicting_twice_or_nothing_is_fine(mux):
    mux.evict()
    alloc(mux, "weights", 100)
    mux.evict()
    mux.evict("weights")
    assert mux.stats()["pages_held"] == 0


def test_evicting_inside_a_phase_is_refused(mux):
    with mux.phase("x"), pytest.raises(pymux.LeaseError):
        mux.evict()


def test_idle_lends_the_device_out_and_gets_it_back(node_factory):
    node = node_factory("32M")
    a = node.start(
        """
mux = pymux.connect("a")
r = mux.region("w")
with mux.phase("long") as lease:
    block = r.allocate(10 * PAGE); fill(block, 5)
    say("in")
    hear()
    with lease.idle():
        say("idle"); hear()
    check(block, 5)
    say("back")
"""
    )
    assert hear(a) == "in"
    b = node.start(
        'mux = pymux.connect("b")\nr = mux.region("w")\nwith mux.phase("p"): b = r.allocate(16 * PAGE)\nsay("ran")'
    )
    node.until(lambda s: s["queue"])
    say(a)
    assert hear(a) == "idle"
    assert hear(b) == "ran"
    say(a)
    assert hear(a) == "back"


def test_an_idle_that_does_not_get_the_device_back_says_why(node_factory):
    node = node_factory("32M")
    a = node.start(
        """
mux = pymux.connect("a")
try:
    with mux.phase("long", timeout=0.3) as lease, lease.idle():
        say("idle"); hear()
except pymux.AcquireTimeout as e:
    say("timeout")
hear()
with mux.phase("again"): say("again")
"""
    )
    assert hear(a) == "idle"
    b = job(node, "b", 1, pages=2)
    assert order(b, "hold") == "holding"
    say(a)
    assert hear(a) == "timeout"
    say(b)
    assert hear(b) == "left"
    say(a)
    assert hear(a) == "again"


def test_a_yield_point_switches_only_when_somebody_waits(node_factory):
    node = node_factory("32M")
    a = node.start(
        """
mux = pymux.connect("a")
with mux.phase("long") as lease:
    say(lease.yield_point())
    hear()
    while not lease.recalled: time.sleep(0.001)
    say(lease.yield_point())
"""
    )
    assert hear(a) == "False"
    b = node.start('mux = pymux.connect("b")\nwith mux.phase("p"): say("ran")')
    say(a)
    assert hear(b) == "ran"
    assert hear(a) == "True"


def test_require_is_for_regions_that_the_phase_uses(mux):
    mux.region("weights")
    mux.region("optimizer")
    mux.region("other")
    with mux.phase("train", uses=("weights",), lazy=("optimizer",)) as lease:
        lease.require("optimizer")
        lease.require("weights")
        with pytest.raises(pymux.UnknownRegion, match="lazy="):
            lease.require("other")
    with pytest.raises(pymux.LeaseError):
        lease.require("weights")


def test_waiting_ends_at_the_timeout_and_leaves_the_queue(node_factory):
    node = node_factory("32M")
    a = job(node, "a", 1, pages=2)
    assert order(a, "hold") == "holding"
    b = node.start(
        """
mux = pymux.connect("b")
try:
    with mux.phase("p", timeout=0.2): pass
except pymux.AcquireTimeout as e:
    say(e)
hear()
with mux.phase("p"): pass
say("ran")
"""
    )
    assert "pymux status" in hear(b)
    assert node.until(lambda s: not s["queue"])
    say(b)
    node.until(lambda s: s["queue"])
    say(a)
    assert hear(b) == "ran"


def test_ctrl_c_ends_a_wait(node_factory):
    node = node_factory("32M")
    a = job(node, "a", 1, pages=2)
    assert order(a, "hold") == "holding"
    b = node.start(
        """
import signal
signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored in what a shell runs in the background
mux = pymux.connect("b")
try:
    with mux.phase("p"): pass
except KeyboardInterrupt:
    say("interrupted")
hear()
"""
    )
    node.until(lambda s: s["queue"])
    b.send_signal(signal.SIGINT)
    assert hear(b) == "interrupted"
    node.until(lambda s: not s["queue"])


def test_two_processes_of_one_name_are_told_apart(node):
    job(node, "same", 1, pages=1)
    out = node.run(
        """
try:
    pymux.connect("same")
except pymux.ClientExists as e:
    say(e)
with pymux.connect("same", name="second") as mux, mux.phase("x"):
    say("ok")
"""
    )
    assert "name=" in out.splitlines()[0]
    assert out.splitlines()[1] == "ok"


def test_a_job_larger_than_the_device_is_refused_at_once(node_factory):
    node = node_factory("16M")
    out = node.run(
        """
mux = pymux.connect("big")
r = mux.region("w")
blocks = []
try:
    with mux.phase("load"):
        for _ in range(9): blocks.append(r.allocate(PAGE))
except pymux.CapacityError as e:
    say(e)
with mux.phase("again"): say(len(blocks))
"""
    )
    assert "needs 18 MiB" in out
    assert "has 16 MiB" in out
    assert out.splitlines()[-1] == "8"


def test_a_second_jobs_growth_evicts_the_first_instead_of_failing(node_factory):
    node = node_factory("32M")
    a = job(node, "a", 1, pages=14)
    b = job(node, "b", 2, pages=1)
    c = job(node, "c", 3, pages=14)
    for p, v in ((a, "2"), (b, "3"), (c, "4")):
        assert order(p, "phase") == v


def test_unused_regions_make_room_within_one_job(node_factory):
    node = node_factory("32M")
    out = node.run(
        """
mux = pymux.connect("a")
w, o = mux.region("weights"), mux.region("optimizer")
with mux.phase("x", uses=("weights",)):
    bw = w.allocate(10 * PAGE); fill(bw, 1)
with mux.phase("y", uses=("optimizer",)):
    bo = o.allocate(10 * PAGE); fill(bo, 2)
with mux.phase("z", uses=("weights",)): check(bw, 1)
with mux.phase("z", uses=("optimizer",)): check(bo, 2)
try:
    with mux.phase("both"): pass
except pymux.CapacityError as e: say(e)
"""
    )
    assert "40 MiB" in out
    assert "32 MiB" in out


def test_a_closed_mux_says_so(mux):
    mux.close()
    mux.close()
    with pytest.raises(pymux.LeaseError, match="closed"), mux.phase("x"):
        pass
    assert mux.stats()["phase"] == "closed"


def test_several_connections_in_one_process_do_not_clash():
    with pymux.connect("one") as a, pymux.connect("two") as b:
        block = alloc(a, "w", 100)
        other = alloc(b, "w", 100)
        with a.phase("x"):
            memoryview(block)[:1] = b"a"
        with b.phase("x"):
            memoryview(other)[:1] = b"b"
            assert b.region_of(other.ptr) is b.region("w")
            assert b.region_of(block.ptr) is None


def test_a_forked_child_is_told_to_spawn_instead(node):
    out = node.run(
        """
mux = pymux.connect("a")
pid = os.fork()
if pid == 0:
    try:
        with mux.phase("x"): pass
    except pymux.LeaseError as e:
        say("spawn" in str(e))
    mux.close()
    os._exit(0)
os.waitpid(pid, 0)
with mux.phase("x"): say("parent ok")
"""
    )
    assert out.split("\n")[:2] == ["True", "parent ok"]


@pytest.mark.parametrize("how", ["del mux", "mux.close()", "sys.exit(0)", "pass", "mux.close(); del block"])
def test_every_way_to_end_a_process_is_clean(node, how):
    node.run(f"mux = pymux.connect('a')\nr = mux.region('w')\nwith mux.phase('x'): block = r.allocate(3 * PAGE)\n{how}")
    node.until(lambda s: not s["clients"] and s["devices"][0]["free_pages"] == 32)


def test_names_that_do_not_fit_are_refused():
    for bad in ("", "x" * 64, "a\0b"):
        with pytest.raises(pymux.ConfigError):
            pymux.connect(bad)
    with pytest.raises(pymux.ConfigError):
        pymux.connect("a", swap="everything")


def test_a_device_that_is_not_there_is_named():
    with pytest.raises(pymux.DriverError, match="no device 7"):
        pymux.connect("a", device=7)


def test_no_broker_and_none_to_be_started_is_said(monkeypatch, tmp_path):
    monkeypatch.setenv("PYMUX_RUNTIME_DIR", str(tmp_path / "nobody"))
    with pytest.raises(pymux.BrokerLost, match="pymux broker"):
        pymux.connect("a", start_broker=False, connect_timeout=0.1)


def test_the_reprs_tell_what_matters(mux):
    block = alloc(mux, "weights", 3 * MIB)
    assert "test/main" in repr(mux)
    assert "4 MiB on the device" in repr(mux)
    assert "3.0 MiB allocated" in repr(mux.region("weights"))
    with mux.phase("train") as lease:
        assert "train" in repr(lease)
    assert block.size


def test_the_trace_has_waits_phases_and_swaps(mux):
    block = alloc(mux, "weights", 2 * PAGE)
    mux.evict()
    with mux.phase("train"):
        pass
    trace = mux.trace()
    assert [(s["kind"], s["name"]) for s in trace["spans"][-2:]] == [("wait", "train"), ("phase", "train")]
    assert sum(s["bytes"] for s in trace["swaps"] if s["direction"] == "in") == 2 * PAGE
    assert all(s["begin"] <= s["end"] for s in (*trace["spans"], *trace["swaps"]))
    assert block.size


def test_host_memory_is_released_when_asked(mux):
    block = alloc(mux, "weights", 2 * PAGE)
    mux.evict()
    pinned = mux.stats()["host_pinned_bytes"]
    assert pinned >= 2 * PAGE
    with mux.phase("x"):
        pass
    del block
    mux.evict()
    assert mux.trim_host() == pinned
    assert mux.stats()["host_pinned_bytes"] == 0


def test_threads_may_allocate_at_the_same_time(mux):
    region = mux.region("weights")
    blocks = []
    with mux.phase("x"):
        threads = [
            threading.Thread(target=lambda: blocks.extend(region.allocate(300_000) for _ in range(10)))
            for _ in range(4)
        ]
        for t in threads:
            t.start()
        for t in threads:
            t.join()
    spans = sorted((b.ptr, b.ptr + b.size) for b in blocks)
    assert len(spans) == 40
    assert all(a[1] <= b[0] for a, b in pairwise(spans))


def test_leaving_waits_for_device_work_on_every_stream(mux, cuda, context):
    import ctypes

    n = 8 * PAGE
    block = alloc(mux, "weights", n)
    host, stream = ctypes.c_void_p(), ctypes.c_void_p()
    cuda.ok("cuMemHostAlloc", ctypes.byref(host), ctypes.c_size_t(n), 0)
    ctypes.memset(host, 6, n)
    cuda.ok("cuStreamCreateWithPriority", ctypes.byref(stream), 1, 0)
    with mux.phase("x"):
        cuda.ok("cuMemcpyHtoDAsync_v2", ctypes.c_uint64(block.ptr), host, ctypes.c_size_t(n), stream)
    mux.evict()
    out = bytearray(n)
    mux.region("weights").read(block.ptr, out)
    assert out == b"\x06" * n
    cuda.ok("cuStreamDestroy_v2", stream)
    cuda.ok("cuMemFreeHost", host)


def test_a_parked_lease_is_entered_again_without_a_message(mux):
    with mux.phase("x"):
        pass
    before = mux.stats()
    for _ in range(100):
        with mux.phase("x"):
            pass
    after = mux.stats()
    assert after["reentries"] - before["reentries"] == 100
    assert after["grants"] == before["grants"]


def test_time_in_a_phase_is_not_lost_to_waiting_threads(mux):
    """Other Python threads run while a phase is waited for."""
    ticks = []
    stop = threading.Event()

    def tick():
        while not stop.is_set():
            ticks.append(time.monotonic())
            time.sleep(0.001)

    t = threading.Thread(target=tick)
    t.start()
    holder = pymux.connect("holder")
    phase = holder.phase("x")
    holder._enter(phase, detached=True)  # as another process would
    with pytest.raises(pymux.AcquireTimeout):
        with mux.phase("y", timeout=0.3):
            pass
    phase.__exit__(None, None, None)
    holder.close()
    stop.set()
    t.join()
    assert len(ticks) > 10


def test_the_environment_is_checked(monkeypatch):
    monkeypatch.setenv("PYMUX_PAGE_SIZE", "huge")
    with pytest.raises(pymux.ConfigError, match="huge"):
        pymux.connect("a")
    monkeypatch.setenv("PYMUX_PAGE_SIZE", "2M")
    monkeypatch.setenv("PYMUX_CHECK", "maybe")
    with pytest.raises(pymux.ConfigError, match="PYMUX_CHECK"):
        pymux.connect("a")


def test_a_missing_driver_names_the_file(node):
    out = node.run(
        'try: pymux.connect("a")\nexcept pymux.ConfigError as e: say(e)', PYMUX_DRIVER="/nowhere/libcuda.so.1"
    )
    assert "/nowhere/libcuda.so.1" in out
    assert "PYMUX_DRIVER" in out


def test_a_library_that_is_no_driver_names_the_missing_function(node):
    import ctypes.util

    out = node.run(
        'try: pymux.connect("a")\nexcept pymux.DriverError as e: say(e)',
        PYMUX_DRIVER=ctypes.util.find_library("c"),
    )
    assert "no function cuInit" in out


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can act as another user")
def test_another_users_runtime_directory_is_refused(node):
    node.runtime.mkdir(mode=0o700)
    os.chown(node.runtime, 12345, 12345)
    out = node.run('try: pymux.connect("a", connect_timeout=1)\nexcept pymux.PymuxError as e: say(type(e).__name__)')
    assert out.strip() in {"BrokerLost", "NotAllowed"}


def test_a_pinned_region_stays_and_says_why(node_factory):
    node = node_factory("32M")
    out = node.run("""
mux = pymux.connect("a")
region, other = mux.region("graph"), mux.region("other")
with mux.phase("init"):
    kept, moved = region.allocate(4 * PAGE), other.allocate(4 * PAGE)
region.pin("NCCL has registered it")
try:
    mux.evict("graph")
except pymux.RegionError as e:
    say(e)
say(mux.evict())
with pymux.connect("b") as b:
    with b.region("w"):
        block = b.region("w").allocate(12 * PAGE)
    say(mux.stats()["regions"]["graph"]["resident_bytes"])
    try:
        with b.phase("more", timeout=1):
            again = b.region("w").allocate(1)
    except pymux.PymuxError as e:
        say(type(e).__name__)
region.unpin()
say(mux.evict("graph"))
""")
    why, first, kept, error, last = out.splitlines()
    assert why == "region 'graph' stays on the device: NCCL has registered it"
    assert int(first) == 4 * PAGE
    assert int(kept) == 4 * PAGE
    assert error in {"DeviceOutOfMemory", "CapacityError"}
    assert int(last) == 4 * PAGE
