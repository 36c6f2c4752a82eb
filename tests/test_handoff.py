"""Processes sharing one device: contents, deaths, recalls; over real sockets and descriptors."""

import os
import signal
import time

from tests.conftest import MIB, hear, say

JOB = """
name, byte, pages = os.environ["NAME"], int(os.environ["BYTE"]), int(os.environ["PAGES"])
mux = pymux.connect(name, device=int(os.environ.get("DEVICE", 0)))
region = mux.region("weights", on_evict=os.environ.get("ON_EVICT", "keep"))
with mux.phase("init"):
    block = region.allocate(pages * PAGE)
    fill(block, byte)
say("ready")
for order in iter(hear, ""):
    if order == "phase":
        with mux.phase("train"):
            check(block, byte)
            byte = (byte + 1) % 256
            fill(block, byte)
        say(byte)
    elif order == "hold":
        with mux.phase("train"):
            say("holding")
            hear()
            check(block, byte)
        say("left")
    elif order == "read-only":
        with mux.phase("rollout", writes=()):
            check(block, byte)
        say(byte)
    elif order == "stats":
        say(json.dumps(mux.stats()))
    elif order.startswith("die at call "):
        from pymux import _core
        ctypes.CDLL(_core.load_driver("sim")).cudasim_fail_nth(b"*", ctypes.c_long(int(order.split()[-1])), -9, 0)
        say("armed")
    elif order == "address":
        say(block.ptr)
"""


def job(node, name, byte, pages, **env):
    p = node.start(JOB, NAME=name, BYTE=str(byte), PAGES=str(pages), **env)
    assert hear(p) == "ready"
    return p


def stats(p):
    import json

    say(p, "stats")
    return json.loads(hear(p))


def order(p, text):
    say(p, text)
    return hear(p)


def test_contents_and_addresses_survive_many_handoffs(node_factory):
    node = node_factory("32M")
    jobs = [job(node, f"job{i}", 10 * i, pages=8) for i in range(3)]
    addresses = [order(p, "address") for p in jobs]
    for turn in range(6):
        for i, p in enumerate(jobs):
            assert order(p, "phase") == str(10 * i + turn + 1)
    assert [order(p, "address") for p in jobs] == addresses
    assert all(stats(p)["regions"]["weights"]["swapped_out_bytes"] > 0 for p in jobs)


def test_only_the_pages_that_lack_move(node_factory):
    node = node_factory("32M")  # 16 pages: two jobs of 9 lack 2
    a, b = (job(node, n, 1, pages=9) for n in "ab")
    order(a, "phase")
    order(b, "phase")
    moved = stats(a)["regions"]["weights"]["swapped_out_bytes"]
    order(a, "phase")
    order(b, "phase")
    assert stats(a)["regions"]["weights"]["swapped_out_bytes"] - moved == 2 * 2 * MIB


def test_when_both_fit_nothing_moves(node_factory):
    node = node_factory("32M")
    a, b = (job(node, n, 1, pages=8) for n in "ab")
    for _ in range(3):
        order(a, "phase")
        order(b, "phase")
    for p in (a, b):
        r = stats(p)["regions"]["weights"]
        assert r["swapped_out_bytes"] == r["swapped_in_bytes"] == 0


def test_what_was_not_written_is_not_copied_again(node_factory):
    node = node_factory("32M")
    a, b = job(node, "a", 1, pages=16), job(node, "b", 2, pages=16)
    order(a, "read-only")
    before = stats(a)["regions"]["weights"]
    order(b, "phase")
    order(a, "read-only")
    after = stats(a)["regions"]["weights"]
    assert after["swapped_out_bytes"] == before["swapped_out_bytes"]
    assert after["avoided_clean_bytes"] - before["avoided_clean_bytes"] == 16 * 2 * MIB


def test_pages_are_passed_not_created_anew(node_factory):
    node = node_factory("32M")
    a, b = job(node, "a", 1, pages=16), job(node, "b", 2, pages=16)
    created = set(os.listdir(node.home / "sim" / "dev0"))
    order(a, "phase")
    order(b, "phase")
    assert {f for f in os.listdir(node.home / "sim" / "dev0") if f.startswith("p-")} <= created


def test_without_page_passing_pages_are_freed_and_created(node_factory):
    node = node_factory("32M", PYMUX_PASS_PAGES="0")
    a, b = job(node, "a", 1, pages=12), job(node, "b", 2, pages=12)
    for turn in range(3):
        assert order(a, "phase") == str(1 + turn + 1)
        assert order(b, "phase") == str(2 + turn + 1)


def test_a_discarded_region_gives_its_pages_without_a_copy(node_factory):
    node = node_factory("32M")
    a = job(node, "a", 1, pages=10, ON_EVICT="discard")
    b = job(node, "b", 2, pages=10)
    order(b, "phase")
    r = stats(a)["regions"]["weights"]
    assert r["swapped_out_bytes"] == 0
    assert r["discarded_bytes"] == r["lost_bytes"] > 0
    assert r["lost_generation"] > 0


def test_a_busy_python_thread_does_not_keep_its_pages(node_factory):
    """The agent needs no GIL: a job deep in C code that holds it still gives its pages back."""
    node = node_factory("32M")
    busy = node.start(
        """
mux = pymux.connect("busy")
with mux.phase("init"):
    pass
region = mux.region("weights")
with mux.phase("init"):
    block = region.allocate(16 * PAGE)
say("ready")
hear()
ctypes.PyDLL(None).usleep(4_000_000)  # holds the GIL
say("back")
"""
    )
    assert hear(busy) == "ready"
    say(busy)
    other = node.start(
        'mux = pymux.connect("other")\nr = mux.region("w")\n'
        'with mux.phase("x"): b = r.allocate(16 * PAGE)\nsay("got it")'
    )
    began = time.monotonic()
    assert hear(other) == "got it"
    assert time.monotonic() - began < 3.5, "the pages came only after the busy thread woke"
    assert hear(busy) == "back"


def test_killing_the_holder_gives_the_device_to_the_next(node_factory):
    node = node_factory("32M")
    a, b = job(node, "a", 1, pages=10), job(node, "b", 2, pages=10)
    assert order(a, "hold") == "holding"
    say(b, "phase")
    node.until(lambda s: s["queue"])
    a.send_signal(signal.SIGKILL)
    assert hear(b) == "3"
    status = node.until(lambda s: len(s["clients"]) == 1)
    assert status["devices"][0]["budget_pages"] == 16


def answers(p):
    try:
        say(p, "stats")
    except BrokenPipeError:
        return False
    return bool(p.stdout.readline())


def killed_at_every_call(node, survivor, victim, hand_over, most=60):
    """Start a victim, let it die at its n-th driver call of a handoff; until it makes no more."""
    for n in range(1, most):
        p = victim(n)
        hand_over(p, f"die at call {n}")
        alive = answers(p)
        p.kill()
        assert p.wait(20) == -signal.SIGKILL
        node.until(lambda s: len(s["clients"]) == 1)
        if alive:
            return n
        order(survivor, "phase")  # checks its contents
    raise AssertionError(f"still making driver calls after {most}")


def test_a_giver_killed_at_any_driver_call_of_a_handoff_takes_nothing_with_it(node_factory):
    node = node_factory("16M")  # 8 pages
    receiver = job(node, "receiver", 1, pages=5)

    def hand_over(giver, death):
        order(giver, death)
        order(receiver, "phase")

    ended = killed_at_every_call(node, receiver, lambda n: job(node, f"giver{n}", 7, pages=5), hand_over)
    assert ended > 5, "it made no calls"


def test_a_receiver_killed_at_any_driver_call_of_a_handoff_takes_nothing_with_it(node_factory):
    node = node_factory("16M")
    giver = job(node, "giver", 1, pages=5)

    def hand_over(receiver, death):
        order(giver, "phase")  # the receiver is swapped out first
        order(receiver, death)
        say(receiver, "phase")
        receiver.stdout.readline()  # an answer, or its end

    ended = killed_at_every_call(node, giver, lambda n: job(node, f"receiver{n}", 7, pages=5), hand_over)
    assert ended > 5, "it made no calls"


def test_killing_one_that_waits_harms_nobody(node_factory):
    node = node_factory("32M")
    a, b, c = (job(node, n, 1, pages=6) for n in "abc")
    assert order(a, "hold") == "holding"
    say(b, "phase")
    node.until(lambda s: len(s["queue"]) == 1)
    say(c, "phase")
    node.until(lambda s: len(s["queue"]) == 2)
    b.send_signal(signal.SIGKILL)
    say(a)
    assert hear(a) == "left"
    assert hear(c) == "2"


def test_clients_go_on_when_the_broker_is_killed(node_factory):
    node = node_factory("32M")
    a, b = job(node, "a", 1, pages=10), job(node, "b", 2, pages=10)
    order(a, "phase")
    assert order(a, "hold") == "holding"
    first = node.status()["pid"]
    os.kill(first, signal.SIGKILL)
    after = node.until(lambda s: len(s["clients"]) == 2)
    assert after["pid"] != first
    assert after["devices"][0]["leases"][0]["job"] == "a", "the open phase kept its lease"
    say(b, "phase")
    node.until(lambda s: s["queue"])
    say(a)
    assert hear(a) == "left"
    assert hear(b) == "3"
    for turn in range(2):
        assert order(a, "phase") == str(3 + turn)
        assert order(b, "phase") == str(4 + turn)
    assert stats(a)["reconnects"] == 1


def test_a_waiting_client_keeps_its_request_when_the_broker_is_killed(node_factory):
    node = node_factory("32M")
    a, b = job(node, "a", 1, pages=10), job(node, "b", 2, pages=10)
    assert order(a, "hold") == "holding"
    say(b, "phase")
    status = node.until(lambda s: s["queue"])
    os.kill(status["pid"], signal.SIGKILL)
    node.until(lambda s: s["pid"] != status["pid"] and s["queue"])
    say(a)
    assert hear(a) == "left"
    assert hear(b) == "3"


def test_a_job_that_ends_leaves_its_pages_to_the_others(node_factory):
    node = node_factory("32M")
    a = job(node, "a", 1, pages=16)
    a.stdin.close()
    assert a.wait(20) == 0, a.stderr.read()
    b = job(node, "b", 2, pages=16)
    assert order(b, "phase") == "3"


def test_when_the_last_job_ends_the_device_memory_is_free(node_factory):
    node = node_factory("32M")
    a = job(node, "a", 1, pages=10)
    assert any(f.startswith("p-") for f in os.listdir(node.home / "sim" / "dev0"))
    a.stdin.close()
    assert a.wait(20) == 0, a.stderr.read()
    node.until(lambda s: not s["clients"] and not s["devices"][0]["free_descriptors"])
    free = node.run(
        """
from pymux import _core
lib, ctx = ctypes.CDLL(_core.load_driver("sim")), ctypes.c_void_p()
from pymux.nvml import Nvml
from pymux import wire
say(Nvml(_core.load_driver("sim")).memory(wire.device_name(_core.Device(0).uuid)).used)
"""
    )
    assert free.strip() == "0"


def test_snapshot_swapping_moves_everything_at_every_yield(node_factory):
    node = node_factory("32M")
    out = node.run(
        """
mux = pymux.connect("s", swap="snapshot")
r = mux.region("weights")
with mux.phase("a"):
    block = r.allocate(4 * PAGE); fill(block, 7)
say(mux.stats()["regions"]["weights"]["resident_bytes"])
with mux.phase("b", writes=()):
    check(block, 7)
s = mux.stats()["regions"]["weights"]
say(s["swapped_out_bytes"] // PAGE); say(s["swapped_in_bytes"] // PAGE)
"""
    )
    assert out.split() == ["0", "8", "4"]
