"""Every public call, setting and option with wrong values: an error in words, and afterwards all works as before."""

import math
import os
import subprocess
import sys

import pytest

import pymux
from tests.conftest import PAGE

LONG = "x" * 10_000
NAN = math.nan
NAMES = ["", 5, None, b"x", LONG, "a\nb", "\0", "\x1b[31m", ["a"]]
NUMBERS = ["5", NAN, -1, None, [], object(), True]
EXPECTED = (pymux.PymuxError, TypeError, ValueError)


class Odd:
    def __repr__(self):
        return "Odd" * 500


# What is called (with the Mux m and its region r), the argument, and values that it cannot have.
CALLS = {
    "connect job": (lambda m, r, v: pymux.connect(v), "job", NAMES),
    "connect name": (lambda m, r, v: pymux.connect("j", name=v), "name", NAMES),
    "connect group": (lambda m, r, v: pymux.connect("j", group=v), "group", [x for x in NAMES if x is not None]),
    "connect device": (lambda m, r, v: pymux.connect("j", device=v), "device", [*NUMBERS, 1.0, 99, 10**30]),
    "connect devices": (
        lambda m, r, v: pymux.connect("j", devices=v),
        "devices",
        [[], "01", 5, [0, 0], ["0"], [-1], [True], [NAN]],
    ),
    "connect rank": (lambda m, r, v: pymux.connect("j", group="g", rank=v, world=2), "rank", [*NUMBERS, 2, 1.5]),
    "connect world": (lambda m, r, v: pymux.connect("j", group="g", world=v), "world", [*NUMBERS, 0, 10**9]),
    "connect controller": (lambda m, r, v: pymux.connect("j", group="g", controller=v), "controller", ["yes", 5, None]),
    "connect device_memory": (
        lambda m, r, v: pymux.connect("j", device_memory=v),
        "device_memory",
        ["big", "-1G", -5, NAN, 1.5, [], "1e300G"],
    ),
    "connect host_memory": (
        lambda m, r, v: pymux.connect("j", host_memory=v),
        "host_memory",
        ["big", "", -5, NAN, None, True],
    ),
    "connect swap": (lambda m, r, v: pymux.connect("j", swap=v), "swap", ["often", 5, LONG, []]),
    "connect timeout": (lambda m, r, v: pymux.connect("j", timeout=v), "timeout", ["5", NAN, -1, [], True]),
    "connect connect_timeout": (lambda m, r, v: pymux.connect("j", connect_timeout=v), "connect_timeout", NUMBERS),
    "current": (lambda m, r, v: pymux.current(v), "", ["nobody", 5, LONG]),
    "region name": (lambda m, r, v: m.region(v), "region", NAMES),
    "region on_evict": (lambda m, r, v: m.region("new", on_evict=v), "on_evict", ["forget", 5, LONG, []]),
    "region track": (lambda m, r, v: m.region("new", track=v), "track", ["pages", 5, LONG]),
    "region frozen": (lambda m, r, v: m.region("new", frozen=v), "frozen", ["no", 1, LONG]),
    "region device": (lambda m, r, v: m.region("new", device=v), "device", ["0", 7, -1, NAN, True, [], LONG]),
    "region timeout": (lambda m, r, v: m.region("new", timeout=v), "timeout", ["5", NAN, -1, [], True]),
    "phase name": (lambda m, r, v: m.phase(v), "phase", NAMES),
    "phase uses": (lambda m, r, v: m.phase("p", uses=v), "uses", ["w", 5, [5], [None], LONG, [["w"]]]),
    "phase writes": (lambda m, r, v: m.phase("p", writes=v), "writes", ["w", 5, [5], Odd()]),
    "phase lazy": (lambda m, r, v: m.phase("p", lazy=v), "lazy", ["w", 5, None, [5]]),
    "phase unknown": (lambda m, r, v: m.phase("p", uses=[v]).__enter__(), "region", ["nothing", LONG]),
    "phase expect": (lambda m, r, v: m.phase("p", expect=v), "expect", NUMBERS),
    "phase timeout": (lambda m, r, v: m.phase("p", timeout=v), "timeout", ["5", NAN, -1, [], True]),
    "phase priority": (lambda m, r, v: m.phase("p", priority=v), "priority", ["5", NAN, 1.5, None, 2**31, True]),
    "phase devices": (lambda m, r, v: m.phase("p", devices=v), "devices", [[], "0", [5], [NAN], 0, [True], ["x"]]),
    "phase decorates": (lambda m, r, v: m.phase("p")(v), "decorates", [5, None, "f"]),
    "evict": (lambda m, r, v: m.evict(v), "region", ["nothing", 5, LONG, []]),
    "adopt": (lambda m, r, v: m.adopt(v), "adopt", [None, 5, "w", [], {}, object(), Odd()]),
    "adopt region": (lambda m, r, v: m.adopt([1], region=v), "", NAMES),
    "to_host": (lambda m, r, v: m.to_host(v), "to_host", [None, 5, "w", []]),
    "state_dict": (lambda m, r, v: m.state_dict(v), "state_dict", [None, 5, "w", []]),
    "open_shared": (lambda m, r, v: m.open_shared(v), "token", ["", 5, None, LONG, "pymux-region:12"]),
    "open_shared gone": (lambda m, r, v: m.open_shared(v), "token", ["pymux-region:" + "0" * 32]),
    "open_shared name": (lambda m, r, v: m.open_shared("pymux-region:" + "0" * 32, name=v), "name", ["", 5, LONG]),
    "allocate": (lambda m, r, v: in_phase(m, lambda: r.allocate(v)), "", [*NUMBERS, 0, 10**30, 1 << 59]),
    "set_live": (
        lambda m, r, v: r.set_live(v),
        "set_live",
        [5, "x", [5], [(1,)], [(1, 2, 3)], [(-1, 5)], [(0, 1 << 62)], [(0.5, 1)]],
    ),
    "pin": (lambda m, r, v: r.pin(v), "reason", [5, None, []]),
    "read ptr": (lambda m, r, v: r.read(v, bytearray(8)), "", ["x", NAN, None, -1, 0, 1 << 63, 10**30]),
    "read to": (lambda m, r, v: r.read(r.base, v), "read", [b"x", 5, None, memoryview(bytearray(9))[::2], "x"]),
    "read too much": (lambda m, r, v: r.read(r.base + r.core.size - 4, v), "read", [bytearray(8)]),
    "publish unshared": (lambda m, r, v: r.publish(v), "shared", [5, None]),
    "share": (lambda m, r, v: in_phase(m, lambda: r.share(v)), "share", [5, "w", [1]]),
    "idle": (lambda m, r, v: in_phase(m, lambda: m.lease.idle(v).__enter__()), "idle", ["5", NAN, -1, None, True]),
    "require": (lambda m, r, v: in_phase(m, lambda: m.lease.require(v)), "region", ["nothing", 5, LONG, [], None]),
    "done_with": (lambda m, r, v: in_phase(m, lambda: m.lease.done_with(v)), "region", ["nothing", 5, LONG, []]),
    "opaque pid": (lambda m, r, v: pymux.opaque(v), "", ["x", -1, 0, None, NAN, 10**12, 1]),
    "opaque memory": (lambda m, r, v: pymux.opaque(1, device_memory=v), "device_memory", ["big", -1, NAN]),
    "opaque timeout": (lambda m, r, v: pymux.opaque(1, lock_timeout=v), "lock_timeout", ["x", -1, NAN, None]),
}


def in_phase(mux, call):
    with mux.phase("around") as lease:
        mux.lease = lease
        return call()


@pytest.fixture(scope="module")
def mux():
    pytest.importorskip("torch")
    with pymux.connect("bad input") as m:
        m.region("w")
        yield m


@pytest.mark.parametrize("call", CALLS, ids=list(CALLS))
def test_a_wrong_argument_is_an_error_in_words(mux, call):
    function, argument, values = CALLS[call]
    for value in values:
        with pytest.raises(EXPECTED) as e:
            function(mux, mux.region("w"), value)
        text, shown = str(e.value), repr(value)[:40]
        assert 10 < len(text) < 300, (shown, text[:600])
        assert argument in text, (shown, text[:600])
    with mux.phase("after", timeout=60):
        block = mux.region("w").allocate(100)
        memoryview(block)[:3] = b"abc"
    out = bytearray(3)
    mux.region("w").read(block.ptr, out)
    assert out == b"abc"
    assert not mux.active
    assert set(mux.regions) <= {"w", "weights"}


SETTINGS = {
    "PYMUX_SIM_CAPACITY": ["abc", "-5", "0", "nan", "1K", "3Q", LONG],
    "PYMUX_SIM_LINK": ["-5", "fast", "0", "nan", "1e"],
    "PYMUX_SIM_DEVICES": ["0", "-1", "x", "65", "1.5"],
    "PYMUX_SIM_FAIL": ["foo", "cuMemCreate", "cuMemCreate:0:2", "cuMemCreate:1:x", "cuMemCreate:1:2,", LONG],
    "PYMUX_SIM_DIR": ["/nowhere/at/all", "/dev/null", "/proc/self"],
    "PYMUX_PAGE_SIZE": ["3M", "1", "abc", "-2M", "2G"],
    "PYMUX_CAPACITY": ["abc", "-1", "0"],
    "PYMUX_HOST_BUDGET": ["abc", "-1"],
    "PYMUX_PASS_PAGES": ["yes please", "2"],
    "PYMUX_CHECK": ["maybe", "2"],
    "PYMUX_DRIVER": ["/nowhere/libcuda.so.1", "gpu", "/dev/null"],
    "PYMUX_RUNTIME_DIR": ["/dev/null", "/dev/null/x", "/tmp/" + "x" * 200],
    "PYMUX_JOB": [LONG, "a\nb"],
}


@pytest.mark.parametrize("name", SETTINGS)
def test_a_wrong_setting_is_refused_with_its_name_where_it_is_read(name, tmp_path):
    for value in SETTINGS[name]:
        env = {
            **os.environ,
            "PYMUX_RUNTIME_DIR": str(tmp_path / "run"),
            "PYMUX_SIM_DIR": str(tmp_path / "sim"),
            name: value,
        }
        code = "import pymux\ntry: pymux.connect('j')\nexcept pymux.PymuxError as e: print(type(e).__name__, e)"
        p = subprocess.run(
            [sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=120, check=False
        )
        assert p.returncode == 0, (value[:40], p.stderr[:600])
        kind, _, text = p.stdout.partition(" ")
        assert kind in {"ConfigError", "DriverError"}, (value[:40], p.stdout[:600], p.stderr[:600])
        assert name in text, (value[:40], text[:600])
        assert len(text) < 300, (value[:40], text[:600])
        assert any(word in text for word in ("such as", "Use ", "use ", "Set ", "give ")), text


COMMANDS = [
    ["broker", "--linger", "nan"],
    ["broker", "--linger", "-1"],
    ["broker", "--linger", "soon"],
    ["broker", "--host-budget", "abc"],
    ["broker", "--host-budget", "-1"],
    ["broker", "--spill-dir", "/nowhere"],
    ["broker", "--spill-dir", "/" + "x" * 4000],
    ["broker", "--config", "/nowhere.toml"],
    ["broker", "--config", "/dev/null/x"],
    ["broker", "--policy", "best"],
    ["broker", "--policy", LONG],
    ["broker", "--max-wait", "0"],
    ["broker", "--max-wait", "nan"],
    ["broker", "--max-wait", "inf"],
    ["broker", "--job", "math"],
    ["broker", "--job", "math:weight=x"],
    ["broker", "--job", "math:weight=nan"],
    ["broker", "--job", "math:device=-1"],
    ["broker", "--job", "math:priority=99999999999"],
    ["broker", "--job", "math:" + LONG],
    ["broker", "--unresponsive-after", "-1"],
    ["broker", "--allow-group", "no such group"],
    ["broker", "--driver", "/nowhere/libcuda.so.1"],
    ["broker", "--background", "--driver", "/nowhere/libcuda.so.1"],
    ["broker", "--what"],
    ["broker", "--stop"],
    ["status"],
    ["status", "--json"],
    ["run"],
    ["run", "--", "no-such-program"],
    ["run", "--job", LONG, "--", "true"],
    ["run", "--job", "", "--", "true"],
    ["opaque", "x"],
    ["opaque", "-5"],
    ["opaque", "1", "--device", "-1"],
    ["opaque", "1", "--device-memory", "big"],
    ["opaque", "1", "--slice", "nan"],
    ["opaque", "1", "--slice", "-1"],
    ["opaque", "999999999"],
    ["demo", "--jobs", "0"],
    ["demo", "--jobs", "x"],
    ["demo", "--steps", "0"],
    ["demo", "--capacity", "abc"],
    ["demo", "--device", "99"],
    ["demo", "--output", "/dev/null"],
    ["demo", "--json", "/"],
    ["nonsense"],
]


@pytest.mark.parametrize("command", COMMANDS, ids=lambda c: " ".join(c)[:60])
def test_a_wrong_option_ends_the_command_in_words(command, tmp_path):
    env = {**os.environ, "PYMUX_RUNTIME_DIR": str(tmp_path / "run"), "PYMUX_SIM_DIR": str(tmp_path / "sim")}
    run = [sys.executable, "-m", "pymux.cli", *command]
    p = subprocess.run(run, env=env, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
    said = p.stderr[:800]
    assert p.returncode in {1, 2}, said
    assert "Traceback" not in said
    assert "Error" in said
    assert len(p.stderr) < 500, said
    assert p.stdout == ""


def test_bad_things_leave_the_devices_memory_alone(mux):
    assert mux.stats()["regions"]["w"]["live_bytes"] <= PAGE
