"""Processes that hold devices together: whole or not at all, drained by all, undone when one cannot."""

import os
import signal
import time

import pytest

import pymux
from tests.conftest import hear, say
from tests.test_handoff import job, order, stats

WORKER = """
rank, world = int(os.environ["RANK"]), int(os.environ["WORLD"])
mux = pymux.connect("engine", group="tp", rank=rank, world=world, device=int(os.environ.get("DEVICE", rank)))
region = mux.region("weights")
kv = mux.region("kv_cache", on_evict="discard")
with mux.phase("init"):
    block = region.allocate(int(os.environ.get("PAGES", 4)) * PAGE)
    fill(block, 7 + rank)
say("ready")
for order in iter(hear, ""):
    if order == "work":  # as the controller says, inside a phase that it opened
        check(block, 7 + rank)
        say("worked" if mux.active else "outside a phase")
    elif order == "phase":
        with mux.phase("train"):
            check(block, 7 + rank)
            say("in")
            hear()
        say("left")
    elif order == "evict":
        say(mux.evict())
    elif order == "stats":
        say(json.dumps(mux.stats()))
    elif order.startswith("fail "):
        from pymux import _core
        _, n, code, forever = order.split()
        lib = ctypes.CDLL(_core.load_driver("sim"))
        lib.cudasim_fail_nth(b"cuMemMap", ctypes.c_long(int(n)), int(code), int(forever))
        say("armed")
"""

CONTROLLER = """
mux = pymux.connect("engine", group="tp", controller=True)
say("ready")
for order in iter(hear, ""):
    if order.startswith("open"):
        try:
            uses = tuple(order.split()[1:]) or None
            with mux.phase("rollout", uses=uses, writes=(), timeout=20) as lease:
                say("active")
                for inner in iter(hear, "close"):
                    if inner == "yield":
                        say(lease.yield_point())
            say("closed")
        except pymux.PymuxError as e:
            say(f"{type(e).__name__}: {e}")
"""


@pytest.fixture
def engine(node_factory):
    """Two workers on two devices of their own, and a controller."""
    node = node_factory("32M", PYMUX_SIM_DEVICES="2")
    workers = [node.start(WORKER, RANK=str(r), WORLD="2") for r in range(2)]
    assert [hear(w) for w in workers] == ["ready"] * 2
    controller = node.start(CONTROLLER)
    assert hear(controller) == "ready"
    return node, controller, workers


def test_a_controller_opens_a_phase_on_all_devices_of_its_group(engine):
    node, controller, workers = engine
    assert order(controller, "open weights") == "active"
    status = node.status()
    assert [d["leases"][0]["phase"] for d in status["devices"]] == ["rollout"] * 2
    assert [order(w, "work") for w in workers] == ["worked"] * 2
    assert order(controller, "close") == "closed"
    assert [d["leases"] for d in node.status()["devices"]] == [[], []]


def test_it_gets_all_devices_or_none_and_no_order_of_requests_wedges(engine):
    node, controller, _ = engine
    others = [job(node, f"solo{d}", 40 + d, pages=14, DEVICE=str(d)) for d in range(2)]
    assert order(others[0], "phase") == "41"
    assert order(others[1], "hold") == "holding"
    say(controller, "open weights")
    node.until(lambda s: s["queue"])
    assert order(others[0], "phase") == "42", "known to be short, while device 0 is kept for the group"
    say(others[1])
    assert hear(others[1]) == "left"
    assert hear(controller) == "active"
    say(others[0], "phase")
    time.sleep(0.1)
    assert node.status()["queue"][0]["job"] == "solo0"
    assert order(controller, "close") == "closed"
    assert hear(others[0]) == "43"


def test_members_regions_come_back_on_every_device(engine):
    node, controller, workers = engine
    for d in range(2):
        assert order(job(node, f"big{d}", 1, pages=16, DEVICE=str(d)), "phase") == "2"
    assert all(stats(w)["regions"]["weights"]["evicted_bytes"] > 0 for w in workers)
    assert order(controller, "open weights") == "active"
    assert [order(w, "work") for w in workers] == ["worked"] * 2
    assert order(controller, "close") == "closed"


def test_members_that_open_the_same_phase_are_in_it_together(engine):
    node, _, workers = engine
    assert order(workers[0], "phase") == "in"
    assert order(workers[1], "phase") == "in"
    assert len({x["generation"] for d in node.status()["devices"] for x in d["leases"]}) == 1
    say(workers[0])
    node.until(lambda s: all(d["leases"] for d in s["devices"]))
    say(workers[1])
    assert [hear(w) for w in workers] == ["left"] * 2
    node.until(lambda s: not any(d["leases"] for d in s["devices"]))


def test_one_that_opens_another_phase_meanwhile_is_told(engine):
    _, controller, workers = engine
    assert order(controller, "open weights") == "active"
    say(workers[0], "phase")
    with pytest.raises(pytest.fail.Exception, match="LeaseError.*'rollout' open"):
        hear(workers[0])


def test_a_region_that_no_member_has_is_named(engine):
    _, controller, workers = engine
    answer = order(controller, "open weigths")
    assert answer.startswith("UnknownRegion")
    assert "weigths" in answer
    assert order(controller, "open weights") == "active"
    assert order(workers[1], "work") == "worked"


def test_a_grant_that_one_member_cannot_follow_is_undone_and_tried_again(engine):
    node, controller, workers = engine
    for d in range(2):
        assert order(job(node, f"big{d}", 1, pages=16, DEVICE=str(d)), "phase") == "2"
    assert order(workers[1], "fail 1 2 0") == "armed"
    assert order(controller, "open weights") == "active"
    assert [order(w, "work") for w in workers] == ["worked"] * 2
    assert order(controller, "close") == "closed"


def test_a_grant_that_never_works_is_an_error_at_the_one_who_asked_and_nobody_keeps_the_devices(engine):
    node, controller, workers = engine
    bigs = [job(node, f"big{d}", 1, pages=16, DEVICE=str(d)) for d in range(2)]
    for b in bigs:
        order(b, "phase")
    assert order(workers[1], "fail 1 2 1") == "armed"
    answer = order(controller, "open weights")
    assert answer.startswith("DeviceOutOfMemory")
    assert "cuMemMap" in answer
    assert [order(b, "phase") for b in bigs] == ["3", "3"]
    assert order(workers[1], "fail 0 0 0") == "armed"
    assert order(controller, "open weights") == "active"
    assert [order(w, "work") for w in workers] == ["worked"] * 2


def test_a_member_that_dies_ends_its_part_and_those_who_ask_are_told(engine):
    node, controller, workers = engine
    other = job(node, "other", 1, pages=4, DEVICE="1")
    assert order(controller, "open weights") == "active"
    workers[1].send_signal(signal.SIGKILL)
    assert order(other, "phase") == "2", "the dead member's device is free"
    assert order(workers[0], "work") == "worked"
    assert order(controller, "close") == "closed"
    answer = order(controller, "open weights")
    assert answer.startswith("MemberLost")
    assert "rank 1" in answer
    again = node.start(WORKER, RANK="1", WORLD="2")
    assert hear(again) == "ready"
    assert order(controller, "open weights") == "active"


def test_a_controller_that_dies_in_a_phase_leaves_the_devices_to_others(engine):
    node, controller, workers = engine
    assert order(controller, "open weights") == "active"
    controller.send_signal(signal.SIGKILL)
    node.until(lambda s: not any(d["leases"] for d in s["devices"]))
    assert order(job(node, "other", 1, pages=16), "phase") == "2"
    second = node.start(CONTROLLER)
    assert hear(second) == "ready"
    assert order(second, "open weights") == "active"
    assert [order(w, "work") for w in workers] == ["worked"] * 2


def test_a_group_keeps_its_phase_when_the_broker_is_killed(engine):
    node, controller, workers = engine
    assert order(controller, "open weights") == "active"
    os.kill(node.status()["pid"], signal.SIGKILL)
    node.until(lambda s: len(s["clients"]) == 3)
    assert [order(w, "work") for w in workers] == ["worked"] * 2
    assert [d["leases"][0]["job"] for d in node.status()["devices"]] == ["engine"] * 2
    assert order(controller, "close") == "closed"
    assert order(controller, "open weights") == "active"


def test_a_yield_point_of_the_controller_gives_all_devices_away(engine):
    node, controller, workers = engine
    other = job(node, "other", 1, pages=16, DEVICE="1")
    assert order(controller, "open weights") == "active"
    assert order(controller, "yield") == "False"
    say(other, "phase")
    node.until(lambda s: any(x["state"] == "pressed" for d in s["devices"] for x in d["leases"]))
    assert order(controller, "yield") == "True"
    assert hear(other) == "2"
    assert [order(w, "work") for w in workers] == ["worked"] * 2


def test_one_process_with_two_devices(node_factory):
    node = node_factory("32M", PYMUX_SIM_DEVICES="2")
    out = node.run(
        """
import threading
mux = pymux.connect("both", devices=[0, 1])
left, right = mux.region("left"), mux.region("right", device=1)
with mux.phase("init"):
    blocks = [left.allocate(8 * PAGE), right.allocate(8 * PAGE)]
    fill(blocks[0], 1); fill(blocks[1], 2)
others = [pymux.connect(f"other{d}", device=d) for d in range(2)]
for m in others:
    with m.phase("fill"):
        b = m.region("r").allocate(16 * PAGE)
        fill(b, 9)
    say(mux.stats()["regions"]["left" if m is others[0] else "right"]["evicted_bytes"] == 8 * PAGE)
    del b
with mux.phase("both", uses=("left", "right")) as lease:
    check(blocks[0], 1); check(blocks[1], 2)
    say(mux.active)
with mux.phase("one", devices=[1]):
    check(blocks[1], 2)
    with others[0].phase("beside", timeout=5, uses=()):
        say("beside")
with mux.region("right"):
    say("block")
say(mux.stats()["pages_held"])
try:
    mux.phase("x", devices=[5])
except pymux.ConfigError as e:
    say(e)
"""
    ).splitlines()
    assert out[:4] == ["True", "True", "True", "beside"]
    assert out[4] == "block"
    assert "devices=[5]" in out[6]


def test_two_that_want_two_devices_in_opposite_order_take_turns(node_factory):
    node = node_factory("32M", PYMUX_SIM_DEVICES="2")
    code = """
mux = pymux.connect(os.environ["NAME"], devices=json.loads(os.environ["DEVICES"]))
for i in range(50):
    with mux.phase("p"): pass
say("done")
"""
    ps = [node.start(code, NAME=n, DEVICES=d) for n, d in (("a", "[0, 1]"), ("b", "[1, 0]"))]
    assert [hear(p) for p in ps] == ["done", "done"]


@pytest.mark.parametrize(
    "options",
    [
        {"group": "g", "rank": 2, "world": 2},
        {"controller": True},
        {"world": 2},
        {"devices": []},
        {"devices": [0, 0]},
        {"devices": [0], "group": "g"},
        {"group": ""},
    ],
)
def test_what_makes_no_sense_is_refused_before_anything_starts(options):
    with pytest.raises(pymux.ConfigError):
        pymux.connect("j", **options)


def test_a_member_too_many_or_of_a_taken_rank_is_refused(engine):
    node, *_ = engine
    out = node.run(
        """
for options in ({"rank": 2, "world": 3}, {"rank": 1, "world": 2, "name": "x"}):
    try:
        pymux.connect("engine", group="tp", **options)
    except pymux.ConfigError as e:
        say("refused")
"""
    )
    assert out.split() == ["refused"] * 2


def test_a_controller_has_no_regions(node):
    out = node.run(
        """
mux = pymux.connect("j", group="g", controller=True)
try:
    mux.region("weights")
except pymux.RegionError as e:
    say(e)
"""
    )
    assert "controller" in out


def test_a_swap_on_one_device_keeps_nobody_waiting_on_another(node_factory):
    node = node_factory("32M", PYMUX_SIM_DEVICES="2", PYMUX_SIM_LINK="2e7")
    big = [job(node, f"big{i}", 1, pages=16) for i in range(2)]
    small = [job(node, f"small{i}", 1, pages=2, DEVICE="1") for i in range(2)]
    say(big[0], "phase")  # 64 MiB at 20 MB/s
    node.until(lambda s: any(x["state"] == "granted" for x in s["devices"][0]["leases"]))
    for turn in range(5):
        for s in small:
            assert order(s, "phase") == str(2 + turn)
    leases = [x for d in node.status()["devices"] for x in d["leases"] if x["job"] == "big0"]
    assert [x["state"] for x in leases] == ["granted"], "it still swaps in"
    assert hear(big[0]) == "2"
