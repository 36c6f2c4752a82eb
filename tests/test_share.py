"""Regions that several processes map: one copy on the device, one in host memory, whoever comes and goes."""

import fcntl
import json
import os
import random
import signal
import struct
import time
from pathlib import Path

import pytest

from tests.conftest import PAGE, PATIENCE, hear, say

F_OFD_SETLK = 37  # <fcntl.h>; Python 3.9 and later have it in fcntl, where the headers do

PROCESS = """
mux = pymux.connect(os.environ["NAME"])
pages = int(os.environ.get("PAGES", 0))
own = mux.region("own")
own_pages = int(os.environ.get("OWN", 0))
if own_pages:
    with mux.phase("init", uses=("own",)):
        mine = own.allocate(own_pages * PAGE)
        fill(mine, 77)
byte = int(os.environ.get("BYTE", 0))
token = os.environ.get("TOKEN")
if token:
    shared = mux.open_shared(token, writable="WRITABLE" in os.environ)
    address, size = shared.base, pages * PAGE
else:
    shared = mux.region("weights")
    with mux.phase("fill", uses=("weights",)):
        block = shared.allocate(pages * PAGE)
        fill(block, byte)
    address, size = block.ptr, block.size
    token = shared.share()
say(token)

def contents():
    got = ctypes.string_at(address, size)
    return str(got[0]) if got == got[:1] * size else "torn"

for order, _, argument in ((line.partition(" ")) for line in iter(hear, "")):
    try:
        if order == "write":
            with mux.phase("train", uses=("weights",)):
                ctypes.memset(address, int(argument), size)
                answer = shared.publish()
            say(answer)
        elif order == "read":
            with mux.phase("rollout"):
                if own_pages:
                    check(mine, 77)
                answer = contents()
            say(answer)
        elif order == "peek":
            buffer = bytearray(size)
            shared.read(address, buffer)
            say(str(buffer[0]) if buffer == buffer[:1] * size else "torn")
        elif order == "hold":
            with mux.phase("rollout"):
                say(contents())
                hear()
                after = contents()
            say(after)
        elif order == "own":
            with mux.phase("own", uses=("own",)):
                check(mine, 77)
            say("checked")
        elif order == "evict":
            say(mux.evict())
        elif order == "poke":
            with mux.phase("rollout"):
                ctypes.memset(address, 1, 1)
            say("written")
        elif order == "arm":
            from pymux import _core
            fail = ctypes.CDLL(_core.load_driver("sim")).cudasim_fail_nth
            fail(b"*", ctypes.c_long(int(argument)), 999, 0)
            say("armed")
        elif order == "disarm":
            fail.restype = ctypes.c_long
            say(fail(b"*", ctypes.c_long(0), 0, 0))
        elif order == "stats":
            s = mux.stats()
            say(json.dumps(s))
        elif order == "close":
            mux.close()
            say("closed")
    except pymux.PymuxError as e:
        say(f"{type(e).__name__}: {e}")
"""


def writer(node, pages, byte=3, **env):
    p = node.start(PROCESS, NAME="trainer", PAGES=str(pages), BYTE=str(byte), **env)
    return p, hear(p)


def reader(node, token, pages, name="sampler", **env):
    p = node.start(PROCESS, NAME=name, PAGES=str(pages), TOKEN=token, **env)
    assert hear(p) == token
    return p


def order(p, text):
    say(p, text)
    return hear(p)


def stats(p):
    return json.loads(order(p, "stats"))


def moved(*processes):
    """Bytes of the shared region that these processes have copied, in either direction."""
    regions = [stats(p)["regions"]["weights"] for p in processes]
    return sum(r["swapped_out_bytes"] + r["swapped_in_bytes"] for r in regions)


def test_generations_reach_the_reader_and_nothing_is_copied(node_factory):
    node = node_factory("32M")
    w, token = writer(node, pages=8)
    r = reader(node, token, pages=8)
    assert order(r, "read") == "3"
    for generation in range(2, 7):
        assert order(w, f"write {generation}") == str(generation)
        assert order(r, "read") == str(generation)
    assert moved(w, r) == 0
    held = [c["pages_held"] for c in node.status()["clients"]]
    assert sum(held) == 8, "on the device once"
    assert stats(r)["regions"]["weights"]["borrowed_bytes"] == 8 * PAGE


def test_a_shared_page_leaves_once_and_comes_back_to_who_needs_it(node_factory):
    node = node_factory("32M")  # 16 pages
    w, token = writer(node, pages=8)
    r = reader(node, token, pages=8)
    other = node.start(PROCESS, NAME="other", PAGES="14")
    assert hear(other)
    assert order(w, "write 9") == "2"
    assert order(r, "read") == "9"
    before = moved(w, r)
    assert order(other, "read") == "0"  # 14 of 16 pages: 6 of the shared ones leave, by agreement
    assert moved(w, r) - before == 6 * PAGE, "out once, though two map them"
    assert order(r, "read") == "9"  # and come back here
    assert moved(w, r) - before == 2 * 6 * PAGE
    assert stats(w)["pages_held"] + stats(r)["pages_held"] == 8
    assert order(w, "write 4") == "3"
    assert moved(w, r) - before == 2 * 6 * PAGE, "the writer maps what the reader brought in"
    assert order(r, "read") == "4"


def test_pages_that_a_running_phase_maps_stay(node_factory):
    node = node_factory("32M")
    w, token = writer(node, pages=8)
    r = reader(node, token, pages=8)
    assert order(r, "hold") == "3"
    assert order(w, "evict") == "0", "by agreement of all who map them"
    assert stats(w)["regions"]["weights"]["resident_bytes"] == 8 * PAGE
    assert order(r, "go on") == "3"
    assert order(w, "evict") == str(8 * PAGE)
    assert stats(r)["regions"]["weights"]["borrowed_bytes"] == 0
    assert order(r, "read") == "3"


def test_the_writer_may_end_and_the_next_reader_still_finds_the_base_model(node_factory):
    node = node_factory("32M")
    w, token = writer(node, pages=8, byte=5)
    first = reader(node, token, pages=8, name="first")
    assert order(first, "read") == "5"
    assert order(w, "close") == "closed"
    assert order(first, "read") == "5"
    second = reader(node, token, pages=8, name="second", OWN="2")
    assert order(second, "read") == "5"
    assert order(first, "close") == "closed"
    assert order(second, "read") == "5"


def test_a_killed_carrier_leaves_its_pages_to_who_maps_them(node_factory):
    node = node_factory("32M")
    w, token = writer(node, pages=8, byte=6)
    r = reader(node, token, pages=8)
    assert order(r, "hold") == "6"
    w.send_signal(signal.SIGKILL)
    w.wait()
    node.until(lambda s: [c["pages_held"] for c in s["clients"]] == [8])  # a phase uses them, and pays
    assert order(r, "go on") == "6"
    assert stats(r)["regions"]["weights"]["borrowed_bytes"] == 0
    assert order(r, "read") == "6"


def test_what_a_dead_carrier_left_to_somebody_idle_leaves_the_device(node_factory):
    node = node_factory("32M")
    w, token = writer(node, pages=8, byte=6)
    r = reader(node, token, pages=8)
    assert order(r, "read") == "6"
    w.send_signal(signal.SIGKILL)
    w.wait()
    deadline = time.monotonic() + 60
    while stats(r)["regions"]["weights"]["borrowed_bytes"] and time.monotonic() < deadline:
        time.sleep(0.05)
    s = stats(r)
    assert s["regions"]["weights"]["evicted_bytes"] == 8 * PAGE, "what nobody counts"
    assert s["pages_held"] == 0
    assert order(r, "read") == "6"


def test_what_only_the_dead_one_had_is_an_error_and_not_old_contents(node_factory):
    node = node_factory("32M")
    w, token = writer(node, pages=4)
    r = reader(node, token, pages=4, OWN="1")
    w.send_signal(signal.SIGKILL)
    w.wait()
    answer = order(r, "read")
    assert answer.startswith("ContentsLost")
    assert "Share it anew" in answer
    assert order(r, "own") == "checked"


def test_a_stopped_reader_keeps_pages_for_no_longer_than_the_agreement_takes(node_factory):
    node = node_factory("32M")
    w, token = writer(node, pages=8)
    r = reader(node, token, pages=8)
    assert order(r, "read") == "3"
    r.send_signal(signal.SIGSTOP)
    begin = time.monotonic()
    assert order(w, "evict") == "0"
    assert time.monotonic() - begin < 5
    assert order(w, "write 8") == "2"
    r.send_signal(signal.SIGCONT)
    assert order(r, "read") == "8"
    assert order(w, "evict") == str(8 * PAGE)


def test_reading_without_a_lease(node_factory):
    node = node_factory("32M")
    w, token = writer(node, pages=4, byte=12)
    r = reader(node, token, pages=4)
    assert order(r, "peek") == "12"  # on the device, of another process
    assert order(w, "evict") == str(4 * PAGE)
    assert order(r, "peek") == "12"  # in host memory
    assert order(w, "peek") == "12"


def test_a_reader_that_may_write(node_factory):
    node = node_factory("32M")
    w, token = writer(node, pages=4)
    r = reader(node, token, pages=4, WRITABLE="1")
    assert order(r, "read") == "3"
    assert order(w, "evict") == str(4 * PAGE)
    assert order(r, "write 21") == "2"
    assert order(w, "read") == "21"
    assert order(r, "evict") == str(4 * PAGE), "it brought them in"
    assert order(w, "read") == "21"


@pytest.mark.skipif("tsan" in os.environ.get("LD_PRELOAD", ""), reason="the thread sanitizer handles signals itself")
def test_writing_what_was_opened_to_be_read_ends_with_a_line_that_says_so(node_factory):
    node = node_factory("32M")
    w, token = writer(node, pages=4)
    r = reader(node, token, pages=4)
    say(r, "poke")
    _, err = r.communicate(timeout=30 * PATIENCE)
    assert r.returncode == -signal.SIGSEGV
    assert "opened to be read" in err
    assert order(w, "read") == "3"


def test_crowd_of_readers_in_turn_under_pressure(node_factory):
    node = node_factory("40M")  # 20 pages
    w, token = writer(node, pages=8, OWN="6")
    readers = [reader(node, token, pages=8, name=f"sampler{i}", OWN="6") for i in range(3)]
    for turn in range(4):
        assert order(w, f"write {turn + 40}") == str(turn + 2)
        for r in readers:
            assert order(r, "read") == str(turn + 40)
            assert order(w, "own") == "checked"
    held = sum(c["pages_held"] for c in node.status()["clients"])
    assert held <= 20


@pytest.mark.parametrize("what", ["read", "evict", "peek", "close"])
def test_whichever_driver_call_of_sharing_fails(node_factory, what):
    node = node_factory("32M")
    w, token = writer(node, pages=2, byte=8)
    r = reader(node, token, pages=2)
    at, left = 0, 0
    while left == 0:  # until the call that would fail is none of these
        at += 1
        if what == "close":
            r.kill()
            r.wait()
            r = reader(node, token, pages=2, name=f"sampler{at}")
            assert order(r, "read") == "8"
        elif at % 2 and what == "read":  # from host memory, else from the other's
            assert not order(w, "evict").startswith("C")
        else:
            assert order(w, "read") == "8"
        victim = w if what == "evict" else r
        assert order(victim, f"arm {at}") == "armed"
        answer = order(victim, what)
        left = int(order(victim, "disarm"))
        if what in {"read", "peek"}:
            assert answer == "8" or answer.startswith("CudaError"), answer
        if what != "close":
            assert order(victim, "read") == "8"  # first, so that it carries what it gave away
            assert order(r, "read") == "8"
        assert order(w, "read") == "8"
    assert at > 3
    held = sum(c["pages_held"] for c in node.until(lambda s: s["clients"])["clients"])
    assert held <= 2 + (what == "close")


@pytest.mark.parametrize("seed", [1, 2])
def test_deaths_and_stops_at_random_change_nothing_for_the_others(node_factory, seed):
    rnd = random.Random(seed)
    node = node_factory("40M")  # 20 pages
    w, token = writer(node, pages=8, byte=1, OWN="3")
    sharing = [w]
    other = node.start(PROCESS, NAME="other", PAGES="14")
    assert hear(other)
    value, answer, end = "1", "", time.monotonic() + 8
    while time.monotonic() < end:
        what, p = rnd.random(), rnd.choice(sharing)
        if what < 0.15 or len(sharing) < 3:
            writable = {"WRITABLE": "1"} if rnd.random() < 0.5 else {}
            name = f"sampler{len(node.processes)}"
            sharing.append(reader(node, token, pages=8, name=name, OWN=rnd.choice("024"), **writable))
        elif what < 0.25:
            sharing.remove(p)
            if rnd.random() < 0.4:
                assert order(p, "close") == "closed"
            p.kill()
            p.wait()
        elif what < 0.3:
            p.send_signal(signal.SIGSTOP)
            order(rnd.choice([q for q in sharing if q is not p]), "evict")
            p.send_signal(signal.SIGCONT)
        elif what < 0.5:
            assert order(other, "read") == "0"
        elif what < 0.6:
            order(p, "evict")
        elif what < 0.75 and p is w:
            value = str(rnd.randrange(1, 255))
            answer = order(w, f"write {value}")
            assert answer.isdigit() or answer.startswith("ContentsLost"), answer
        else:
            answer = order(p, "read")
            assert answer == value or answer.startswith("ContentsLost"), answer
        if answer.startswith("ContentsLost"):
            break  # only the dead one had it: said, and not another's contents
    assert sum(c["pages_held"] for c in node.status()["clients"]) <= 20


@pytest.mark.parametrize("token", ["", "weights", "pymux-region:xyz", 5])
def test_what_is_no_token(node, token):
    out = node.run(f"""
mux = pymux.connect("a")
try:
    mux.open_shared({token!r})
except pymux.ConfigError as e:
    say(e)
""")
    assert "region.share()" in out


def test_errors_of_sharing(node):
    out = node.run("""
mux = pymux.connect("a")
def fails(f):
    try:
        f()
    except pymux.PymuxError as e:
        return f"{type(e).__name__}: {e}"
say(fails(lambda: mux.open_shared("pymux-region:" + "0" * 32)))
say(fails(mux.region("kv", on_evict="discard").share))
say(fails(mux.region("fp", track="fingerprint").share))
say(fails(mux.region("plain").publish))
token = mux.region("weights").share()
assert mux.region("weights").share() == token
say(fails(lambda: mux.open_shared(token)))
say(fails(lambda: mux.region("weights").set_live([(0, 10)])))
other = pymux.connect("b")
other.region("weights")
say(fails(lambda: other.open_shared(token)))
opened = other.open_shared(token, name="base")
say(opened.name)
with other.phase("x"):
    say(fails(lambda: opened.allocate(10)))
    say(fails(opened.publish))
say(fails(lambda: other.phase("x", writes=("base",)).__enter__()))
""")
    lines = out.splitlines()
    expected = ["RegionError: no process has", "RegionError: region 'kv'", "RegionError: region 'fp'"]
    expected += ["RegionError: region 'plain' is not shared", "RegionError: this process has", "RegionError: region"]
    expected += ["RegionError: region 'weights' exists", "base", "RegionError: region 'base' is another"]
    expected += ["RegionError: region 'base' was opened to be read", "FrozenRegion"]
    assert len(lines) == len(expected), out
    for line, beginning in zip(lines, expected, strict=True):
        assert line.startswith(beginning), out


def test_who_cannot_join_harms_nobody(node_factory):
    node = node_factory("64M")
    w, token = writer(node, pages=2, byte=4)
    out = node.run(
        f"""
try:
    pymux.connect("odd").open_shared({token!r})
except pymux.PymuxError as e:
    say(e)
""",
        PYMUX_PAGE_SIZE="2M",
        PYMUX_PASS_PAGES="0",
    )
    assert "imports memory" in out
    r = reader(node, token, pages=2)
    assert order(w, "write 6") == "2"
    assert order(r, "read") == "6"


def test_there_is_room_for_many_and_who_finds_none_is_told(node_factory):
    node = node_factory("64M")
    w, token = writer(node, pages=2, byte=4)
    crowd = node.start(f"""
mux = [pymux.connect(f"m{{i}}") for i in range(40)]
opened = [m.open_shared({token!r}) for m in mux]
with mux[39].phase("read", uses=("weights",), writes=()):
    say(ctypes.string_at(opened[39].base + 4096, 1)[0])
hear()
""")
    assert hear(crowd) == "4"
    crowd.kill()
    crowd.wait()
    # All other places are taken, as by processes that live: they are locks on the bytes of a file.
    path = next(p for p in Path(f"/proc/{w.pid}/fd").iterdir() if "pymux-share " in os.readlink(p))
    with path.open("r+b") as places:
        lock = struct.pack("hhqqi4x", fcntl.F_WRLCK, os.SEEK_SET, 1, 0, 0)
        fcntl.fcntl(places, F_OFD_SETLK, lock)
        late = f"""
try:
    pymux.connect("late").open_shared({token!r})
    say("joined")
except pymux.RegionError as e:
    say(e)
"""
        assert "by 1024 processes already" in node.run(late)
    assert node.run(late).strip() == "joined"
    r = reader(node, token, pages=2)
    assert order(w, "write 6") == "2"
    assert order(r, "read") == "6"


def test_torch_tensors_with_their_shapes(node_factory):
    pytest.importorskip("torch")
    node = node_factory("64M")
    code = """
import torch
torch.manual_seed(0)
mux = pymux.connect("trainer")
region = mux.region("weights")
with region:
    model = torch.nn.Sequential(torch.nn.Linear(300, 500), torch.nn.BatchNorm1d(500))
    half = torch.arange(24, dtype=torch.bfloat16).reshape(4, 6).t()
say(region.share({**model.state_dict(), "half": half, "none": torch.empty(0, 3)}))
hear()
with mux.phase("train"):
    model[0].weight.data.mul_(2)
    say(region.publish())
    say(float(model[0].weight.double().sum()))
hear()
"""
    reading = """
import torch
mux = pymux.connect("sampler")
shared = mux.open_shared(os.environ["TOKEN"])
try:
    shared.tensors
except pymux.RegionNotResident as e:
    say("not resident")
with mux.phase("rollout"):
    tensors = shared.tensors
    w = tensors["0.weight"]
    half, none, counter = (tensors[n] for n in ("half", "none", "1.num_batches_tracked"))
    facts = [list(w.shape), str(half.dtype), list(half.stride()), half.tolist()[1], list(none.shape)]
    say(json.dumps([*facts, str(counter.dtype)]))
say("ready")
hear()
with mux.phase("rollout"):
    assert shared.wait_published() == 2
    assert shared.tensors["0.weight"] is w
    say(float(w.double().sum()))
assert torch.equal(mux.to_host(w), mux.to_host(shared.tensors["0.weight"]))
say("done")
"""
    w = node.start(code)
    token = hear(w)
    r = node.start(reading, TOKEN=token)
    assert hear(r) == "not resident"
    shape, dtype, stride, row, none, counter = json.loads(hear(r))
    assert (shape, dtype, stride) == ([500, 300], "torch.bfloat16", [1, 6])
    assert (row, none, counter) == ([1.0, 7.0, 13.0, 19.0], [0, 3], "torch.int64")
    assert hear(r) == "ready"
    assert order(w, "go") == "2"
    total = hear(w)
    assert order(r, "go") == total
    assert hear(r) == "done"


def test_the_sockets_of_the_dead_are_swept(node_factory):
    node = node_factory("32M")
    w, _ = writer(node, pages=1)
    w.send_signal(signal.SIGKILL)
    w.wait()
    left = [p for p in os.listdir(node.runtime) if p.startswith("share-")]
    assert len(left) == 1
    writer(node, pages=1)
    now = [p for p in os.listdir(node.runtime) if p.startswith("share-")]
    assert len(now) == 1
    assert now != left
