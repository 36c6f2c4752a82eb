"""The message format, from both sides."""

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pymux import _core, wire
from pymux.errors import ProtocolError, VersionMismatch


def test_both_sides_have_the_same_messages():
    assert {(x.name, x.type, x.size) for x in wire.LAYOUTS} == set(_core.wire_layout())


def test_a_message_comes_out_as_it_went_in():
    packet = wire.encode("acquire", seq=7, want=3, phase="rollout", dirty=2)
    name, m = wire.decode(packet)
    assert name == "acquire"
    assert (m["seq"], m["want"], m["phase"], m["dirty"], m["clean"]) == (7, 3, "rollout", 2, 0)


def test_long_texts_are_cut_not_overrun():
    _, m = wire.decode(wire.encode("acquire", phase="x" * 100))
    assert m["phase"] == "x" * 63


@pytest.mark.parametrize("packet", [b"", b"abc", wire.encode("ready")[:-1], wire.encode("ready") + b"x"])
def test_truncated_and_oversized_messages_are_refused(packet):
    with pytest.raises(ProtocolError):
        wire.decode(packet)


def test_a_length_field_that_lies_is_refused():
    packet = bytearray(wire.encode("ready"))
    packet[4] += 1
    with pytest.raises(ProtocolError):
        wire.decode(bytes(packet))


def test_another_version_is_named_whatever_the_length():
    packet = wire.encode("hello", version=wire.VERSION + 1)
    for p in (packet, packet[:40], packet + b"more"):
        with pytest.raises(VersionMismatch, match=f"version {wire.VERSION} and the client {wire.VERSION + 1}"):
            wire.decode(p)


@given(st.binary(max_size=600))
def test_no_bytes_crash_the_decoder(packet):
    try:
        name, _ = wire.decode(packet)
    except ProtocolError:
        return
    assert name in {x.name for x in wire.LAYOUTS}


@given(st.sampled_from(wire.LAYOUTS), st.data())
def test_no_body_crashes_the_decoder(layout, data):
    head = wire.encode(layout.name)[:8]
    body = data.draw(st.binary(min_size=layout.size - 8, max_size=layout.size - 8))
    with contextlib.suppress(ProtocolError):
        assert wire.decode(head + body)[0] == layout.name
