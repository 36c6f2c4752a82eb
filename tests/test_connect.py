"""connect(): what it says when it cannot, what a second one says, and who is missing from a group."""

import pytest

from tests.conftest import hear, say

CONNECT = """
began = time.monotonic()
try:
    pymux.connect("a", connect_timeout=60)
    say("connected")
except pymux.PymuxError as e:
    say(f"{type(e).__name__}: {e}")
    say(time.monotonic() - began)
"""


def refused(out):
    error, seconds = out.splitlines()
    assert float(seconds) < 55, "it waited for its timeout"
    return error


def test_a_directory_that_is_open_to_others_is_said_at_once(node):
    node.runtime.mkdir()
    node.runtime.chmod(0o755)
    error = refused(node.run(CONNECT))
    assert error.startswith("NotAllowed:")
    assert "chmod 700" in error


@pytest.mark.parametrize(
    ("setting", "value", "kind", "text"),
    [
        ("PYMUX_BROKER_CONFIG", "/nowhere.toml", "ConfigError", "cannot read /nowhere.toml"),
        ("PYMUX_SPILL_DIR", "/nowhere", "ConfigError", "not a directory that this user can write to"),
    ],
)
def test_what_the_broker_that_it_starts_ends_with_is_raised(node, setting, value, kind, text):
    error = refused(node.run(CONNECT, **{setting: value}))
    assert error.startswith(kind + ":")
    assert text in error


def test_a_broker_that_cannot_start_says_its_last_words(node, tmp_path):
    (tmp_path / "rich.py").write_text("")
    (tmp_path / "click.py").write_text("raise RuntimeError('no click today')")
    error = refused(node.run(CONNECT, PYTHONPATH=str(tmp_path)))
    assert error.startswith("BrokerLost:")
    assert "no click today" in error


def test_a_runtime_directory_that_cannot_be_made(node, tmp_path):
    (tmp_path / "file").write_text("")
    error = refused(node.run(CONNECT, PYMUX_RUNTIME_DIR=str(tmp_path / "file" / "run")))
    assert error.startswith("ConfigError:")
    assert "is not a directory" in error


def test_who_does_not_hear_of_children_connects_all_the_same(node):
    assert node.run("import signal\nsignal.signal(signal.SIGCHLD, signal.SIG_IGN)\n" + CONNECT).strip() == "connected"


def test_several_that_start_at_once_share_one_broker(node):
    processes = [
        node.start('mux = pymux.connect(os.environ["NAME"]); say("in"); hear()', NAME=f"n{i}") for i in range(4)
    ]
    assert [hear(p) for p in processes] == ["in"] * 4
    assert len(node.status()["clients"]) == 4


# ---- a second one ---------------------------------------------------------------------------------


def test_a_second_connect_of_a_process_says_how_to_get_the_first(node):
    out = node.run(
        """
import gc
mux = pymux.connect("a")
try: pymux.connect("a")
except pymux.ClientExists as e: say(e)
number = id(mux)
del mux; gc.collect()
mux = pymux.current()
say(id(mux) == number)
other = pymux.connect("b")
try: pymux.current()
except pymux.LeaseError as e: say(e)
say(pymux.current("b") is other)
pymux.current("a").close()
say(pymux.current() is other)
pymux.connect("a").close()
other.close()
try: pymux.current()
except pymux.LeaseError as e: say(e)
"""
    )
    first, *rest = out.splitlines()
    assert "this process is connected" in first
    assert "pymux.current('a')" in first
    assert "close()" in first
    assert rest[0] == rest[2] == rest[3] == "True"
    assert "2 connections" in rest[1]
    assert "a/main" in rest[1]
    assert "not connected" in rest[4]


def test_another_process_of_the_name_is_another_error(node):
    a = node.start('mux = pymux.connect("a"); say("in"); hear()')
    assert hear(a) == "in"
    out = node.run('try: pymux.connect("a")\nexcept pymux.ClientExists as e: say(e)')
    assert "current" not in out
    assert "another name" in out


# ---- groups that are not whole ----------------------------------------------------------------------

RANK = """
rank, world = int(os.environ["RANK"]), int(os.environ["WORLD"])
try:
    mux = pymux.connect("j", group="g", rank=rank, world=world, timeout=float(os.environ.get("TIMEOUT", "inf")))
    say("in")
    with mux.region("w"): say("block")
except pymux.PymuxError as e:
    say(f"{type(e).__name__}: {e}")
hear()
"""


def test_worlds_that_differ_are_an_error_at_both(node):
    a = node.start(RANK, RANK="0", WORLD="2")
    assert hear(a) == "in"
    node.until(lambda s: s["queue"])
    b = node.start(RANK, RANK="1", WORLD="3")
    for error in (hear(b), hear(a)):
        assert error.startswith("ConfigError:")
        assert "world=3 does not fit" in error


def test_a_member_that_never_comes_is_named(node):
    a = node.start(RANK, RANK="0", WORLD="3")
    assert hear(a) == "in"
    (waits,) = node.until(lambda s: s["queue"])["queue"]
    assert "rank 1, 2 of 3 is not connected" in waits["missing"]
    line = a.stderr.readline()
    assert line.startswith("pymux: phase 'region w' waits for its group")
    assert "rank 1, 2 of 3" in line
    shown = node.run("from pymux.cli import main; main(['status'])")
    assert "rank 1, 2 of 3" in " ".join(shown.split())


def test_a_region_block_takes_a_timeout(node):
    a = node.start(RANK, RANK="0", WORLD="2", TIMEOUT="0.2")
    assert hear(a) == "in"
    assert hear(a).startswith("AcquireTimeout:")
    b = node.start(
        """
mux = pymux.connect("other")
holder = mux.phase("p"); holder.mux._enter(holder, detached=True)
say("in"); hear()
"""
    )
    assert hear(b) == "in"
    out = node.run(
        """
import torch
mux = pymux.connect("c")
for wait in (lambda: mux.region("w", timeout=0.1).__enter__(), lambda: mux.adopt(torch.ones(3), timeout=0.1)):
    try: wait()
    except pymux.AcquireTimeout as e: say(e)
"""
    )
    assert out.count("did not get the device within 0.1 s") == 2
    say(b)


# ---- host memory ------------------------------------------------------------------------------------


def test_host_memory_of_what_was_deleted_goes_to_others(node_factory):
    node = node_factory("512M", PYMUX_HOST_BUDGET="224M")
    a = node.start(
        """
mux = pymux.connect("a")
w = mux.region("w")
with mux.phase("init"): block = w.allocate(64 * PAGE); fill(block, 1)
mux.evict()
del block
say(mux.stats()["host_pinned_bytes"] >> 20)
hear()
"""
    )
    out = node.start(
        """
mux = pymux.connect("b")
say("in"); hear()
w = mux.region("w")
with mux.phase("init"): block = w.allocate(60 * PAGE); fill(block, 2)
mux.evict()
with mux.phase("look"): check(block, 2)
say("fine")
"""
    )
    assert hear(out) == "in"
    assert int(hear(a)) >= 128
    say(out)
    assert hear(out) == "fine"


def test_a_full_host_says_what_is_kept_for_each_process(node_factory):
    node = node_factory("512M", PYMUX_HOST_BUDGET="96M")
    out = node.run(
        """
mux = pymux.connect("a"); other = pymux.connect("b")
w = mux.region("w")
with mux.phase("init"): block = w.allocate(64 * PAGE); fill(block, 1)
try: mux.evict()
except pymux.HostOutOfMemory as e: say(e)
with mux.phase("look"): check(block, 1)
"""
    )
    assert "32 are kept for each process" in out


def test_writes_on_a_region_that_was_opened_to_be_read_names_the_option(node):
    out = node.run(
        """
a, b = pymux.connect("a"), pymux.connect("b")
w = a.region("w")
with a.phase("init"): block = w.allocate(PAGE); token = w.share()
r = b.open_shared(token)
try: b.phase("p", uses=("w",), writes=("w",)).__enter__()
except pymux.FrozenRegion as e: say(e)
"""
    )
    assert "open_shared(token, writable=True)" in out
