"""Nonsense on the wire, at both ends: a broker that hears it goes on, and so does a client."""

import contextlib
import random
import socket
import struct
import threading

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import pymux
from pymux import wire
from tests.conftest import PAGE
from tests.test_broker import broker, peer  # noqa: F401 - fixtures

FROM_BROKER = [x for x in wire.LAYOUTS if x.type > 100 and x.name not in {"welcome", "error"}]
NUMBERS = [0, 1, 2, 3, 7, 64, 1 << 20, (1 << 32) - 1]


def body(layout, rng):
    """Fields that are small, huge or random."""
    packed = b""
    for room in layout.texts:
        packed += rng.randbytes(room) if room else b""
    size = layout.size - 8
    words = b"".join(struct.pack("<I", rng.choice(NUMBERS)) for _ in range(size // 4 + 1))[:size]
    return words if rng.random() < 0.8 else rng.randbytes(size)


REQUESTS = [x for x in wire.LAYOUTS if x.type < 100 and x.name not in {"hello", "status"}]


@given(st.lists(st.tuples(st.sampled_from(REQUESTS), st.integers(0, 1 << 30)), min_size=1, max_size=12))
@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_whatever_a_client_says_the_others_are_served(broker, peer, messages):  # noqa: F811
    p = peer()
    assert p.hello(job="fuzz")[0] == "welcome"
    try:
        for layout, seed in messages:
            p.sock.send(struct.pack("<HHI", layout.type, 0, layout.size) + body(layout, random.Random(seed)))
    except OSError:
        pass  # it was shown the door
    p.close()
    assert broker[0]._scheduler is not None
    b = peer()
    assert b.hello(job=f"bystander{random.random()}")[0] == "welcome"
    b.send("acquire", seq=1, want=1)
    assert "grant" in [b.receive()[0] for _ in range(2)]
    b.close()


class FakeBroker:
    """Welcomes a client and then talks nonsense until it has said enough."""

    def __init__(self, path, seed):
        self.rng = random.Random(seed)
        self.listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.listener.bind(str(path))
        self.listener.listen(8)
        self.thread = threading.Thread(target=self.serve)
        self.thread.start()

    def serve(self):
        s, _ = self.listener.accept()
        s.settimeout(5)
        s.recv(4096)
        s.send(wire.encode("welcome", version=wire.VERSION, client=1, budget=4))
        try:
            for _ in range(60):
                layout = self.rng.choice(FROM_BROKER)
                packet = struct.pack("<HHI", layout.type, 0, layout.size) + body(layout, self.rng)
                cut = self.rng.random()
                if cut < 0.1:
                    packet = packet[: self.rng.randrange(1, len(packet))]
                elif cut < 0.2:
                    packet += b"more"
                s.send(packet)
        except OSError:
            pass
        self.listener.close()
        s.close()


@pytest.mark.parametrize("seed", range(25))
def test_whatever_a_broker_says_the_client_ends_with_a_typed_error_or_none(tmp_path, monkeypatch, seed):
    (tmp_path / "run").mkdir(mode=0o700)
    monkeypatch.setenv("PYMUX_RUNTIME_DIR", str(tmp_path / "run"))
    fake = FakeBroker(tmp_path / "run" / "broker.sock", seed)
    group = {"group": "g"} if seed % 2 else {}
    mux = pymux.connect("victim", start_broker=False, connect_timeout=0.3, **group)
    region = mux.region("w")
    for _ in range(4):
        with contextlib.suppress(pymux.PymuxError), mux.phase("p", timeout=0.1):
            region.allocate(PAGE)
    fake.thread.join(20)
    assert not fake.thread.is_alive()
    assert mux.stats()["pages_held"] >= 0
    mux.close()
    assert mux.stats()["phase"] == "closed"
