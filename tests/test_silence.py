"""Processes that stop answering, and a door that is full or closed: who else is concerned, and who is told what."""

import grp
import os
import signal
import subprocess
import sys
import time

import pytest

from pymux import wire
from tests.conftest import PATIENCE, hear, say
from tests.test_handoff import job, order, stats


def with_rules(node, text):
    (node.home / "broker.toml").write_text(text)
    node.env["PYMUX_BROKER_CONFIG"] = str(node.home / "broker.toml")
    return node


@pytest.fixture
def impatient(node_factory):
    return with_rules(node_factory("32M"), f"unresponsive_after = {PATIENCE}")


def test_a_stopped_holder_is_passed_over_and_goes_on_unharmed_afterwards(impatient):
    a, b = job(impatient, "a", 1, pages=6), job(impatient, "b", 2, pages=6)
    assert order(a, "hold") == "holding"
    a.send_signal(signal.SIGSTOP)
    assert order(b, "phase") == "3", "both fit"
    status = impatient.status()
    assert {c["job"]: c["responsive"] for c in status["clients"]} == {"a": False, "b": True}
    a.send_signal(signal.SIGCONT)
    say(a)
    assert hear(a) == "left", "its contents were checked inside the phase"
    assert stats(a)["fenced"] == 1
    assert order(a, "phase") == "2"
    assert order(b, "phase") == "4"
    impatient.until(lambda s: all(c["responsive"] for c in s["clients"]))


def test_who_needs_the_pages_of_a_stopped_process_waits_and_gets_them_afterwards(impatient):
    a, b, c = (job(impatient, n, 1, pages=p) for n, p in (("a", 10), ("b", 10), ("c", 4)))
    assert order(a, "hold") == "holding"
    a.send_signal(signal.SIGSTOP)
    say(b, "phase")
    impatient.until(lambda s: s["queue"])
    assert order(c, "phase") == "2", "fits beside the stopped one"
    impatient.until(lambda s: [r["job"] for r in s["queue"]] == ["b"])
    a.send_signal(signal.SIGCONT)
    say(a)
    assert hear(a) == "left"
    assert hear(b) == "2"


def test_growing_in_a_fenced_phase_is_an_error_that_says_so(impatient):
    a = impatient.start(
        """
mux = pymux.connect("a")
region = mux.region("r")
try:
    with mux.phase("p"):
        say("in"); hear()
        while not mux.stats()["fenced"]: time.sleep(0.01)
        region.allocate(14 * PAGE)
except pymux.LeaseFenced as e:
    say("fenced")
with mux.phase("p"):
    block = region.allocate(14 * PAGE)
    say("again")
"""
    )
    assert hear(a) == "in"
    a.send_signal(signal.SIGSTOP)
    job(impatient, "b", 2, pages=2)
    a.send_signal(signal.SIGCONT)
    say(a)
    assert hear(a) == "fenced"
    assert hear(a) == "again"


def test_a_stopped_process_is_killed_only_when_the_owner_says_so(node_factory):
    node = with_rules(node_factory("32M"), f"unresponsive_after = {PATIENCE}\nkill_unresponsive = true")
    a, b = job(node, "a", 1, pages=10), job(node, "b", 2, pages=10)
    assert order(a, "hold") == "holding"
    a.send_signal(signal.SIGSTOP)
    assert order(b, "phase") == "3"
    assert a.wait(10) == -signal.SIGKILL


def test_a_job_that_never_fits_is_refused_when_it_connects(node_factory):
    node = with_rules(node_factory("32M"), '[jobs.small]\ndevice = "8M"\nhost = "16M"')
    out = node.run(
        """
for options in ({"job": "any", "device_memory": "33M"}, {"job": "small", "device_memory": "9M"},
                {"job": "small", "host_memory": "17M"}):
    try:
        pymux.connect(**options)
    except MemoryError as e:
        say(f"{type(e).__name__} {e.need >> 20} {e.limit >> 20}")
mux = pymux.connect("small", device_memory="8M")
with mux.phase("p"):
    kept = mux.region("a").allocate(3 * PAGE)
    try:
        more = mux.region("b").allocate(3 * PAGE)
    except pymux.CapacityError as e:
        say("too much")
"""
    )
    assert out.splitlines() == ["CapacityError 33 32", "CapacityError 9 8", "HostOutOfMemory 17 16", "too much"]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can act as another user")
def test_members_of_an_allowed_group_are_let_in_and_others_are_not(node_factory):
    node = with_rules(node_factory("32M"), f'allow_groups = ["{grp.getgrgid(1).gr_name}"]')
    job(node, "a", 1, pages=2)
    node.home.chmod(0o711)
    at = str(node.runtime / "broker.sock")
    code = (
        "import os, socket, sys\nos.setgroups([int(sys.argv[2])])\nos.setgid(54321)\nos.setuid(12345)\n"
        "s = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)\n"
        "try:\n    s.connect(sys.argv[1])\nexcept PermissionError:\n    sys.exit('no entry')\n"
        "s.send(bytes.fromhex(sys.argv[3]))\nsys.stdout.buffer.write(s.recv(4096))"
    )
    hello = wire.encode("hello", version=wire.VERSION, flags=wire.OBSERVER).hex()

    def knock(group):
        command = [sys.executable, "-S", "-c", code, at, str(group), hello]
        return subprocess.run(command, capture_output=True, check=False, timeout=20)

    assert wire.decode(knock(1).stdout)[0] == "welcome"
    assert b"no entry" in knock(2).stderr


def test_more_clients_than_descriptors_are_told_and_the_others_are_served(node_factory):
    node = node_factory("32M")
    serve = (
        "import resource, sys\nresource.setrlimit(resource.RLIMIT_NOFILE, (40, 40))\nfrom pymux import cli\ncli.main()"
    )
    broker = subprocess.Popen([sys.executable, "-c", serve, "broker"], env=node.env, stderr=subprocess.DEVNULL)
    node.processes.append(broker)
    try:
        deadline = time.monotonic() + 10
        while not (node.runtime / "broker.sock").exists():
            assert time.monotonic() < deadline
            time.sleep(0.01)
        a = job(node, "a", 1, pages=2)
        out = node.run(
            """
import socket
from pymux import wire
crowd, told = [], None
while told is None and len(crowd) < 100:
    s = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    s.connect(os.environ["PYMUX_RUNTIME_DIR"] + "/broker.sock")
    crowd.append(s)
    s.settimeout(0.05)
    try:
        told = wire.decode(s.recv(4096))[1]["text"]
    except TimeoutError:
        pass
say(told)
"""
        )
        assert "ulimit -n" in out
        assert order(a, "phase") == "2"
        assert order(job(node, "b", 1, pages=2), "phase") == "2", "the crowd is gone"
    finally:
        for pipe in ("stdin", "stdout", "stderr"):
            setattr(broker, pipe, open(os.devnull))  # noqa: SIM115 - the fixture closes them
        broker.terminate()
        broker.wait()


def test_a_lent_device_comes_back_before_who_would_take_longer(node_factory):
    node = node_factory("32M")
    a = node.start(
        """
mux = pymux.connect("a")
with mux.phase("long") as lease:
    say("in")
    while not lease.recalled: time.sleep(0.001)
    with lease.idle(expect=0.5):
        say("idle"); hear()
    say("back")
"""
    )
    assert hear(a) == "in"
    b = node.start('mux = pymux.connect("b")\nwith mux.phase("p", expect=60.0): say("ran")')
    assert hear(a) == "idle"
    say(a)
    assert hear(a) == "back", "sixty seconds do not fit into half of one"
    assert hear(b) == "ran"


def test_a_phase_with_overlap_runs_beside_a_more_urgent_one(node_factory):
    node = node_factory("32M")
    a = job(node, "a", 1, pages=6)
    assert order(a, "hold") == "holding"
    out = node.run(
        """
mux = pymux.connect("b")
with mux.phase("evaluate", overlap=True, priority=1):
    block = mux.region("r").allocate(4 * PAGE)
    fill(block, 7)
    say("beside")
"""
    )
    assert out.split() == ["beside"]
    say(a)
    assert hear(a) == "left"
