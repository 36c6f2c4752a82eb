"""Bad input at the broker's door: each gets a typed answer, and no other client notices."""

import os
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from pymux import wire
from pymux.broker import AlreadyRunning, Broker
from pymux.errors import DriverError, NotAllowed
from pymux.nvml import Memory
from tests.conftest import PAGE, hear, say
from tests.test_handoff import job, order

UUID = bytes(range(16))


class FakeNvml:
    used = 0
    broken = False

    def memory(self, device):  # noqa: ARG002
        if self.broken:
            raise DriverError("NVML is not itself")
        return Memory(total=16 * PAGE, used=self.used)


@pytest.fixture
def broker(tmp_path):
    b = Broker(tmp_path / "run", FakeNvml(), linger=None)
    thread = threading.Thread(target=b.run)
    thread.start()
    yield b, tmp_path / "run" / "broker.sock"
    b.stop()
    thread.join(10)
    assert not thread.is_alive()


class Peer:
    def __init__(self, path):
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.sock.settimeout(5)
        self.sock.connect(str(path))

    def send(self, name, fds=(), **fields):
        socket.send_fds(self.sock, [wire.encode(name, **fields)], list(fds))

    def receive(self):
        packet, fds, _, _ = socket.recv_fds(self.sock, wire.MAX_MESSAGE, 64)
        return (*wire.decode(packet), fds) if packet else None

    def hello(self, job="j", client="main", **kw):
        fields = {
            "version": wire.VERSION,
            "pid": 1,
            "world": 1,
            "page_size": PAGE,
            "uuid": UUID,
            "group": client,
        }
        self.send("hello", job=job, client=client, **{**fields, **kw})
        return self.receive()

    def close(self):
        self.sock.close()


@pytest.fixture
def peer(broker):
    peers = []

    def make():
        peers.append(Peer(broker[1]))
        return peers[-1]

    yield make
    for p in peers:
        p.close()


def bystander_is_served(peer):
    p = peer()
    assert p.hello(job="bystander")[0] == "welcome"
    p.send("acquire", seq=1, want=2)
    got = [p.receive()[0] for _ in range(2)]
    assert got == ["grant", "give"]


def test_a_hello_is_welcomed_with_the_budget(peer):
    name, m, _ = peer().hello()
    assert name == "welcome"
    assert m["budget"] == 16


@pytest.mark.parametrize(
    "packet",
    [
        b"x",
        b"\0" * 8,
        wire.encode("ready")[:-3],
        struct.pack("<HHI", 99, 0, 8),
        wire.encode("acquire", seq=1),
        wire.encode("grant", seq=1),
        b"\xff" * 5000,
    ],
    ids=["one byte", "zeros", "truncated", "unknown", "before hello", "a broker's message", "oversized"],
)
def test_malformed_messages_get_an_error_and_end_the_connection(peer, packet):
    p = peer()
    p.sock.send(packet)
    name, m, _ = p.receive()
    assert (name, m["code"]) == ("error", wire.ERROR_CODES["ProtocolError"])
    assert m["text"]
    assert p.receive() is None
    bystander_is_served(peer)


def test_an_older_protocol_version_is_told_what_to_do(peer):
    name, m, _ = peer().hello(version=wire.VERSION - 1)
    assert (name, m["code"]) == ("error", wire.ERROR_CODES["VersionMismatch"])
    assert "broker --stop" in m["text"]
    bystander_is_served(peer)


def test_a_second_client_of_the_same_name_is_refused(peer):
    first, second = peer(), peer()
    assert first.hello()[0] == "welcome"
    name, m, _ = second.hello()
    assert (name, m["code"]) == ("error", wire.ERROR_CODES["ClientExists"])
    first.send("acquire", seq=1, want=1)
    assert first.receive()[0] == "grant"


def test_more_descriptors_than_pages_are_refused_and_closed(peer):
    p = peer()
    p.hello()
    r, w = os.pipe()
    p.send("pages", fds=[w, w], count=1)
    os.close(w)
    assert p.receive()[0] == "error"
    assert os.read(r, 1) == b"", "no copy of the pipe's end is left open"
    os.close(r)


def test_descriptors_go_from_one_client_to_the_next(peer):
    a, b = peer(), peer()
    a.hello(job="a")
    b.hello(job="b")
    a.send("acquire", seq=1, want=16)
    _, grant, _ = a.receive()
    assert a.receive()[1]["count"] == 16
    a.send("ready", generation=grant["generation"])
    b.send("acquire", seq=1, want=1)
    assert a.receive()[0] == "recall"
    a.send("release", generation=grant["generation"], resident=16, dirty=16)
    while (message := a.receive())[0] == "recall":
        pass
    assert message[1]["count"] == 1
    assert b.receive()[0] == "grant"
    r, w = os.pipe()
    a.send("pages", fds=[w], count=1, resident=15, dirty=15)
    name, m, fds = b.receive()
    assert (name, m["count"], len(fds)) == ("give", 1, 1)
    os.write(fds[0], b"!")
    assert os.read(r, 1) == b"!"
    for fd in (r, w, *fds):
        os.close(fd)


def test_memory_that_others_use_is_not_given_out(tmp_path):
    nvml = FakeNvml()
    nvml.used = 4 * PAGE
    b = Broker(tmp_path / "run", nvml, linger=None)
    thread = threading.Thread(target=b.run)
    thread.start()
    try:
        p = Peer(tmp_path / "run" / "broker.sock")
        _, m, _ = p.hello()
        p.close()
        assert m["budget"] == 12
    finally:
        b.stop()
        thread.join()


def test_a_broker_outlives_a_failing_nvml(tmp_path, monkeypatch):
    monkeypatch.setattr("pymux.broker.BUDGET_SECONDS", 0.02)
    nvml = FakeNvml()
    b = Broker(tmp_path / "run", nvml, linger=None)
    thread = threading.Thread(target=b.run)
    thread.start()
    try:
        p = Peer(tmp_path / "run" / "broker.sock")
        p.hello()
        nvml.broken = True
        time.sleep(0.1)
        p.send("acquire", seq=1, want=1)
        assert p.receive()[0] == "grant"
        p.close()
    finally:
        b.stop()
        thread.join()


def test_a_second_broker_of_a_directory_gives_way(broker, tmp_path):
    with pytest.raises(AlreadyRunning):
        Broker(tmp_path / "run", FakeNvml())


def test_a_directory_open_to_others_is_refused(tmp_path):
    (tmp_path / "run").mkdir(mode=0o755)
    (tmp_path / "run").chmod(0o755)
    with pytest.raises(NotAllowed, match="chmod 700"):
        Broker(tmp_path / "run", FakeNvml())


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can act as another user")
def test_another_users_process_is_refused_by_its_credentials(node_factory):
    node = node_factory()
    job(node, "a", 1, pages=2)
    for path, mode in ((node.home, 0o755), (node.runtime, 0o755), (node.runtime / "broker.sock", 0o777)):
        path.chmod(mode)
    code = (
        "import os, socket, sys\nos.setuid(12345)\n"
        "s = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)\ns.connect(sys.argv[1])\n"
        "sys.stdout.buffer.write(s.recv(4096))"
    )
    at = str(node.runtime / "broker.sock")
    done = subprocess.run([sys.executable, "-S", "-c", code, at], capture_output=True, check=True, timeout=20)
    name, m = wire.decode(done.stdout)
    assert (name, m["code"]) == ("error", wire.ERROR_CODES["NotAllowed"])
    assert len(node.status()["clients"]) == 1


def test_a_stale_socket_file_is_replaced(node):
    node.runtime.mkdir(mode=0o700)
    stale = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    stale.bind(str(node.runtime / "broker.sock"))
    stale.close()
    p = job(node, "a", 1, pages=2)
    assert order(p, "phase") == "2"


def test_a_broker_without_clients_leaves(tmp_path):
    b = Broker(tmp_path / "run", FakeNvml(), linger=0.05)
    thread = threading.Thread(target=b.run)
    thread.start()
    thread.join(10)
    assert not thread.is_alive()
    assert not (tmp_path / "run" / "broker.sock").exists()


def test_many_clients_at_once_start_one_broker(node):
    ps = [node.start(f'mux = pymux.connect("job{i}")\nsay("in")\nhear()') for i in range(5)]
    assert [hear(p) for p in ps] == ["in"] * 5
    assert len(node.status()["clients"]) == 5
    for p in ps:
        say(p)


def test_the_broker_opens_no_cuda_context(node):
    job(node, "a", 1, pages=2)
    pid = node.status()["pid"]
    maps = Path(f"/proc/{pid}/maps").read_text()
    assert "torch" not in maps
    contexts = [line for line in maps.splitlines() if "/dev0/p-" in line]
    assert contexts == [], "no device memory is mapped in the broker"


def test_a_client_that_floods_and_does_not_read_is_dropped_alone(peer):
    p = peer()
    p.hello()
    deadline = time.monotonic() + 20
    p.sock.settimeout(0.2)
    with pytest.raises(OSError):
        while time.monotonic() < deadline:
            p.send("status")
    bystander_is_served(peer)


def test_stop_ends_the_broker_and_status_says_there_is_none(node):
    job(node, "a", 1, pages=2).kill()
    run = lambda *a: subprocess.run(
        [sys.executable, "-m", "pymux.cli", *a], env=node.env, capture_output=True, text=True, check=False
    )
    shown = run("status")
    assert shown.returncode == 0, shown.stderr
    assert "MiB for regions" in shown.stdout
    assert run("broker", "--stop").returncode == 0
    deadline = time.monotonic() + 10
    while (after := run("status")).returncode == 0:
        assert time.monotonic() < deadline
    assert "BrokerLost" in after.stderr
    assert "connect()" in after.stderr


def test_a_stopped_process_is_only_slow(node_factory):
    node = node_factory("32M")
    a, b = job(node, "a", 1, pages=6), job(node, "b", 2, pages=6)
    a.send_signal(signal.SIGSTOP)
    assert order(b, "phase") == "3", "both fit, and the stopped one holds no lease"
    a.send_signal(signal.SIGCONT)
    assert order(a, "phase") == "2"
