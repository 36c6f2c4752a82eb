"""Whatever driver call fails during a swap: contents intact, nothing leaked, and the next try works."""

import contextlib
import gc
import os

import pytest

import pymux
from tests.conftest import PAGE
from tests.cuda_types import INVALID_VALUE, OUT_OF_MEMORY, UNKNOWN
from tests.test_pager import SPILLING

pytestmark = pytest.mark.skipif(os.environ.get("PYMUX_TEST_DRIVER", "sim") != "sim", reason="faults need no GPU")

PAGES = 5


class Subject:
    """A client with known contents, whose swaps are made to fail."""

    def __init__(self, mux, cuda):
        self.mux, self.cuda, self.seen = mux, cuda, ""
        self.region = mux.region("weights")
        with mux.phase("init"):
            self.block = self.region.allocate(PAGES * PAGE)
            self.view = memoryview(self.block)
            for i in range(PAGES):
                self.view[i * PAGE : i * PAGE + 4] = bytes([i, 1, 2, 3])

    def intact(self):
        out = bytearray(PAGES * PAGE)
        self.region.read(self.block.ptr, out)
        return all(out[i * PAGE : i * PAGE + 4] == bytes([i, 1, 2, 3]) for i in range(PAGES))

    def consistent(self):
        stats = self.mux.stats()
        r = stats["regions"]["weights"]
        assert r["resident_bytes"] + r["evicted_bytes"] == PAGES * PAGE
        assert self.cuda.counts()["mappings"] == r["resident_bytes"] // PAGE
        assert self.cuda.counts()["handles"] <= stats["pages_held"]
        assert stats["pages_held"] >= r["resident_bytes"] // PAGE


@pytest.fixture
def subject(cuda):
    with pymux.connect("faulty") as mux:
        yield Subject(mux, cuda)


def sweep(subject, reset, operation, call, code, forever=False, most=12):
    """Fail the first, second, ... of an operation's driver calls of this name."""
    cuda = subject.cuda
    for n in range(1, most):
        reset()
        cuda.fail_nth(call, n, code, forever)
        with contextlib.suppress(pymux.PymuxError):
            operation()
        subject.seen = subject.mux.stats()["last_fault"]
        cuda.fail_nth(call, 0, 0)
        assert subject.intact(), f"{call} number {n} failed with {code}: {subject.seen}"
        subject.consistent()
        operation()
        assert subject.intact()
        subject.consistent()


@pytest.fixture
def nothing_leaks(cuda):
    """What the driver counts, and the descriptors, are as before."""
    gc.collect()
    before, files = cuda.counts(), len(os.listdir("/proc/self/fd"))
    yield
    cuda.fail_nth("*", 0, 0)
    gc.collect()
    assert cuda.counts() == before
    assert len(os.listdir("/proc/self/fd")) <= files


def every_call(cuda, code, forever, reset, operation, check, most=400):
    """Fail the first, second, ... driver call of an operation until it makes no more of them."""
    for n in range(1, most):
        reset()
        cuda.fail_nth("*", n, code, forever)
        with contextlib.suppress(pymux.PymuxError):
            operation()
        left = cuda.fail_nth("*", 0, 0)
        check(n)
        operation()
        check(n)
        if left > (1 if forever else 0):
            return
    pytest.fail(f"still making driver calls after {most}")


SWEEP = pytest.mark.parametrize("forever", [False, True], ids=["once", "from then on"])
CODES = pytest.mark.parametrize("code", [OUT_OF_MEMORY, INVALID_VALUE, UNKNOWN])


@SWEEP
@CODES
def test_whichever_call_of_a_swap_out_fails(nothing_leaks, cuda, code, forever):
    with pymux.connect("faulty") as mux:
        s = Subject(mux, cuda)

        def dirty():
            with mux.phase("dirty"):
                pass

        def check(n):
            assert s.intact(), f"call {n}: {mux.stats()['last_fault']}"

        every_call(cuda, code, forever, dirty, mux.evict, check)


@SWEEP
@CODES
def test_whichever_call_of_a_swap_in_fails(nothing_leaks, cuda, code, forever):
    with pymux.connect("faulty") as mux:
        s = Subject(mux, cuda)

        def enter():
            with mux.phase("use", writes=()):
                pass

        def check(n):
            assert s.intact(), f"call {n}: {mux.stats()['last_fault']}"

        every_call(cuda, code, forever, mux.evict, enter, check)


@SWEEP
@CODES
def test_whichever_call_of_growth_fails(nothing_leaks, cuda, code, forever):
    """Device memory for new blocks, and host memory for their first swap-out."""
    with pymux.connect("faulty") as mux:
        region = mux.region("weights")
        blocks = []

        def reset():
            blocks.clear()
            gc.collect()
            mux.evict()
            mux.trim_host()

        def grow():
            if not blocks:
                with mux.phase("grow"):
                    block = region.allocate(3 * PAGE)
                    memoryview(block)[:4] = b"here"
                    blocks.append(block)
            mux.evict()

        def check(n):
            out = bytearray(4)
            if blocks:
                region.read(blocks[0].ptr, out)
                assert out == b"here", f"call {n}: {mux.stats()['last_fault']}"

        every_call(cuda, code, forever, reset, grow, check)


@pytest.mark.parametrize(("code", "forever"), [(INVALID_VALUE, False), (UNKNOWN, False), (UNKNOWN, True)])
def test_whichever_call_of_a_handoff_with_write_back_and_prefetch_fails(nothing_leaks, cuda, code, forever):
    """Two clients of one process take turns; whose agent meets the fault is a matter of timing."""
    with pymux.connect("a") as a, pymux.connect("b") as b:
        held = {}
        for i, mux in enumerate((a, b)):
            with mux.phase("init"):
                block = mux.region("w").allocate(18 * PAGE)
                memoryview(block)[:] = bytes([i + 1]) * block.size
                held[mux] = block
        turns = [10]

        def turn(mux, timeout=5):
            with mux.phase("turn", timeout=timeout):
                memoryview(held[mux])[PAGE : PAGE + 1] = bytes([turns[0]])

        def both():
            turn(a)
            turn(b)

        def check(n):
            for i, mux in enumerate((a, b)):
                out = bytearray(18 * PAGE)
                mux.region("w").read(held[mux].ptr, out)
                out[PAGE] = i + 1
                assert out == bytes([i + 1]) * len(out), f"call {n}: {mux.stats()['last_fault']}"

        both()
        for n in range(1, 160, 6):
            cuda.fail_nth("*", n, code, forever)
            for mux in (a, b):
                with contextlib.suppress(pymux.PymuxError):
                    turn(mux, timeout=0.5 if forever else 5)
            cuda.fail_nth("*", 0, 0)
            check(n)
            both()
            check(n)


def test_whichever_call_of_a_swap_by_way_of_the_spill_file_fails(node_factory, tmp_path):
    node = node_factory("64M", PYMUX_HOST_BUDGET="32M", PYMUX_SPILL_DIR=str(tmp_path))
    node.run(
        SPILLING.replace("range(28)", "range(22)")
        + """
from pymux import _core
lib = ctypes.CDLL(_core.load_driver("sim"))
def use():
    with mux.phase("use", writes=()): pass
def dirty():
    with mux.phase("dirty"): pass
for reset, operation in ((dirty, mux.evict), (mux.evict, use)):
    for n in range(1, 150, 7):
        for code, forever in ((2, 0), (999, 1)):
            reset()
            lib.cudasim_fail_nth(b"*", ctypes.c_long(n), code, forever)
            try: operation()
            except pymux.PymuxError: pass
            lib.cudasim_fail_nth(b"*", ctypes.c_long(0), 0, 0)
            whole()
            operation()
            whole()
assert mux.stats()["regions"]["w"]["resident_bytes"] == 22 * PAGE
mux.evict()
assert mux.stats()["regions"]["w"]["spilled_bytes"] == 14 * PAGE
"""
    )


OUT_CALLS = ["cuMemcpyDtoHAsync", "cuEventRecord", "cuEventQuery", "cuMemUnmap", "cuMemExportToShareableHandle",
             "cuMemHostRegister", "cuEventCreate"]  # fmt: skip
IN_CALLS = ["cuMemcpyHtoDAsync", "cuEventRecord", "cuEventQuery", "cuMemMap", "cuMemSetAccess",
            "cuMemImportFromShareableHandle", "cuEventCreate"]  # fmt: skip


@pytest.mark.parametrize("forever", [False, True], ids=["once", "from then on"])
@pytest.mark.parametrize("code", [OUT_OF_MEMORY, INVALID_VALUE, UNKNOWN])
@pytest.mark.parametrize("call", OUT_CALLS)
def test_a_swap_out_that_fails_loses_nothing(subject, call, code, forever):
    def dirty():
        with subject.mux.phase("dirty"):
            pass

    sweep(subject, dirty, subject.mux.evict, call, code, forever)


@pytest.mark.parametrize("forever", [False, True], ids=["once", "from then on"])
@pytest.mark.parametrize("code", [INVALID_VALUE, UNKNOWN])
@pytest.mark.parametrize("call", IN_CALLS)
def test_a_swap_in_that_fails_loses_nothing(subject, call, code, forever):
    def enter():
        with subject.mux.phase("use", writes=()):
            pass

    sweep(subject, subject.mux.evict, enter, call, code, forever)


@pytest.mark.parametrize("code", [INVALID_VALUE, UNKNOWN])
@pytest.mark.parametrize("call", ["cuMemCreate", "cuMemMap", "cuMemSetAccess"])
def test_growth_that_fails_loses_nothing(subject, call, code):
    def grow():
        with subject.mux.phase("grow"):
            extra = subject.mux.region("extra").allocate(3 * PAGE)
            memoryview(extra)[:1] = b"x"

    def consistent():
        r = subject.mux.stats()["regions"]
        resident = sum(x["resident_bytes"] for x in r.values())
        assert subject.cuda.counts()["mappings"] == resident // PAGE

    subject.consistent = consistent
    subject.mux.region("extra")
    sweep(subject, lambda: subject.mux.evict("extra"), grow, call, code)


def test_a_device_that_is_briefly_full_is_waited_for(subject):
    subject.mux.evict()
    subject.cuda.fail_nth("cuMemCreate", 1, OUT_OF_MEMORY)
    with subject.mux.phase("use"):
        pass
    assert subject.intact()


def test_a_lost_context_is_an_error_and_not_retried(node):
    out = node.run(
        """
mux = pymux.connect("lost")
r = mux.region("w")
with mux.phase("x"): b = r.allocate(PAGE)
from pymux import _core
lib = ctypes.CDLL(_core.load_driver("sim"))
lib.cudasim_fail_nth(b"cuCtxSynchronize", ctypes.c_long(1), 700, 0)
for _ in range(2):
    try:
        with mux.phase("y"): pass
    except pymux.CudaError as e:
        say(f"{e.code} {e.call}")
"""
    )
    assert out.splitlines() == ["700 cuCtxSynchronize"] * 2


def test_a_full_host_keeps_the_pages_on_the_device_and_says_so(subject):
    subject.cuda.fail_nth("cuMemHostRegister", 1, OUT_OF_MEMORY, forever=True)
    with pytest.raises(pymux.HostOutOfMemory, match="MiB available") as e:
        subject.mux.evict()
    assert e.value.need > 0
    subject.cuda.fail_nth("cuMemHostRegister", 0, 0)
    assert subject.mux.stats()["regions"]["weights"]["resident_bytes"] == PAGES * PAGE
    assert subject.intact()
    subject.mux.evict()
    assert subject.mux.stats()["regions"]["weights"]["resident_bytes"] == 0
    assert subject.intact()


def test_a_victim_that_cannot_swap_out_fails_the_one_who_asked_and_nobody_else(node_factory):
    from tests.test_handoff import job, order

    node = node_factory("32M")
    a = job(node, "a", 1, pages=10, PYMUX_SIM_FAIL="cuMemHostRegister:1:2:forever")
    out = node.run(
        """
mux = pymux.connect("b")
r = mux.region("w")
try:
    with mux.phase("x"): r.allocate(10 * PAGE)
except pymux.DeviceOutOfMemory as e:
    say(e)
with mux.phase("small"): block = r.allocate(6 * PAGE)
say("fits")
"""
    )
    assert "no other client can give pages" in out
    assert out.splitlines()[-1] == "fits"
    assert order(a, "phase") == "2"
