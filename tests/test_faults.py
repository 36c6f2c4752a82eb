"""Whatever driver call fails during a swap: contents intact, nothing leaked, and the next try works."""

import contextlib
import os

import pytest

import pymux
from tests.conftest import PAGE
from tests.cuda_types import INVALID_VALUE, OUT_OF_MEMORY, UNKNOWN

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
