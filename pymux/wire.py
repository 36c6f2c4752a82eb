"""The messages between agents and the broker, as the broker reads and writes them.

Fixed little-endian structs over SOCK_SEQPACKET; csrc/wire.h has the same table, and a test
compares the two. Page file descriptors travel as ancillary data.
"""

from __future__ import annotations

import re
import struct
from dataclasses import dataclass
from typing import Any

from pymux.errors import ProtocolError, VersionMismatch

VERSION = 4
MAX_FDS = 64
MAX_MESSAGE = 1 << 20

# flags of hello, and of acquire
PASSES_PAGES, OBSERVER, RECONNECT, CONTROLLER, OPENER, JOINT = 1, 2, 4, 8, 16, 32
OVERLAP = 1

# Codes of error and deny messages, by the exception that the client raises.
ERROR_CODES = {
    "ProtocolError": 1,
    "VersionMismatch": 2,
    "ClientExists": 3,
    "NotAllowed": 4,
    "DriverError": 5,
    "CapacityError": 6,
    "DeviceOutOfMemory": 7,
    "HostOutOfMemory": 8,
    "MemberLost": 9,
    "UnknownRegion": 10,
    "DeadlockError": 11,
    "ConfigError": 12,
}

_HEADER = struct.Struct("<HHI")
_COUNTS = "resident discardable clean dirty"
_FIGURES = "resident clean dirty evicted spilled lost copied_out copied_in avoided"


@dataclass(frozen=True, slots=True)
class Layout:
    """One message: its number, its fields and how they are packed."""

    name: str
    type: int
    body: struct.Struct
    fields: tuple[str, ...]
    texts: tuple[int, ...]  # of each field: bytes of a text, or 0
    size: int  # bytes of the whole message


def _layout(name: str, number: int, fmt: str, fields: str) -> Layout:
    body = struct.Struct("<" + fmt)
    texts = tuple(int(size) if kind == "s" else 0 for size, kind in re.findall(r"(\d*)([a-zA-Z])", fmt))
    return Layout(name, number, body, tuple(fields.split()), texts, _HEADER.size + body.size)


LAYOUTS = (
    _layout(
        "hello",
        1,
        "IIIIIIQQQQQQ16s64s64s64s64sQQQQ",
        "version pid flags rank world reserved page_size held lease_generation host_pinned need host_need uuid job "
        "client group phase " + _COUNTS,
    ),
    _layout(
        "acquire",
        2,
        "QQQQQQQiI64sQQQQ",
        "seq want own expected_us ran_us ranks opener priority flags phase " + _COUNTS,
    ),
    _layout("release", 3, "QQQQQQ", "generation back_us " + _COUNTS),
    _layout("ready", 4, "QQQQQQQ", "generation want known " + _COUNTS),
    _layout("want", 5, "QQQQQQQ", "seq want own " + _COUNTS),
    _layout("pages", 6, "IIQQQQQ", "count missing want " + _COUNTS),
    _layout("cancel", 7, "Q", "seq"),
    _layout("status", 8, "", ""),
    _layout("host", 9, "QII", "want urgent reserved"),
    _layout("figures", 10, "64sQQQQQQQQQ", "region " + _FIGURES),
    _layout("names", 11, "1024s", "regions"),
    _layout("failed", 12, "QII512s", "generation for_good reserved text"),
    _layout("ran", 13, "64sQQ", "phase count total_us"),
    _layout("pong", 14, "", ""),
    _layout("kept", 15, "QQ", "generation opener"),
    _layout("queued", 16, "QQQ", "seq opener behind"),
    _layout("welcome", 101, "IIQ256s", "version client budget spill_dir"),
    _layout("error", 102, "QQII512s", "need limit code reserved text"),
    _layout("grant", 103, "QQ64s", "seq generation phase"),
    _layout("recall", 104, "QQII", "generation extend_us press reserved"),
    _layout("take", 105, "II", "count reserved"),
    _layout("give", 106, "II", "count reserved"),
    _layout("deny", 107, "QQQII512s", "seq need budget code reserved text"),
    _layout("host_grant", 109, "QII", "granted exhausted reserved"),
    _layout("report", 110, "", ""),
    _layout("regions", 111, "1024s", "regions"),
    _layout("prepare", 112, "64s", "phase"),
    _layout("active", 113, "Q", "generation"),
    _layout("drain", 114, "Q", "generation"),
    _layout("ended", 115, "Q", "generation"),
    _layout("ping", 116, "", ""),
    _layout("fenced", 117, "QII", "generation requeued reserved"),
    _layout("trim", 118, "", ""),
    _layout("notice", 119, "512s", "text"),
)
_BY_NAME = {x.name: x for x in LAYOUTS}
_BY_TYPE = {x.type: x for x in LAYOUTS}
STATUS_REPLY = 108  # header and JSON
RELEASE_PROMISED = _HEADER.size + 16  # bytes of a release that say of which generation, and that it is not a loan


def encode(name: str, **fields: Any) -> bytes:
    """Pack a message; fields not given are zero, texts are cut to fit with a final NUL."""
    layout = _BY_NAME[name]
    values: list[Any] = []
    for field, room in zip(layout.fields, layout.texts, strict=True):
        value = fields.pop(field, b"" if room else 0)
        if isinstance(value, str):
            value = value.encode()[: room - 1]
        values.append(value)
    if fields:
        raise TypeError(f"message {name} has no fields {sorted(fields)}")
    return _HEADER.pack(layout.type, 0, layout.size) + layout.body.pack(*values)


def decode(packet: bytes) -> tuple[str, dict[str, Any]]:
    """Unpack a message.

    Returns:
        Its name and its fields; texts without their padding.

    Raises:
        ProtocolError: truncated, oversized, or of an unknown type.
        VersionMismatch: a hello of another version, whatever its length.
    """
    if len(packet) < _HEADER.size:
        raise ProtocolError(f"a message of {len(packet)} bytes is shorter than its header")
    number, _, length = _HEADER.unpack_from(packet)
    layout = _BY_TYPE.get(number)
    if layout is None:
        raise ProtocolError(f"unknown message type {number}")
    if layout.name == "hello" and len(packet) >= _HEADER.size + 4:
        (version,) = struct.unpack_from("<I", packet, _HEADER.size)
        if version != VERSION:
            raise VersionMismatch(
                f"this broker speaks protocol version {VERSION} and the client {version}. Use the same pymux "
                f"version for all jobs of a node; stop the broker ('pymux broker --stop') after an upgrade."
            )
    if len(packet) != layout.size or length != layout.size:
        raise ProtocolError(
            f"message {layout.name} has {len(packet)} bytes and says {length}; it must have {layout.size}"
        )
    values = layout.body.unpack_from(packet, _HEADER.size)
    out = dict(zip(layout.fields, values, strict=True))
    for key, room in zip(layout.fields, layout.texts, strict=True):
        if room and key != "uuid":
            out[key] = out[key].split(b"\0", 1)[0].decode(errors="replace")  # a long one may be cut in a character
    return layout.name, out


def encode_status_reply(text: str) -> bytes:
    """Pack the answer to a status request."""
    body = text.encode()
    return _HEADER.pack(STATUS_REPLY, 0, _HEADER.size + len(body)) + body


def decode_status_reply(packet: bytes) -> str:
    """Unpack the answer to a status request.

    Raises:
        ProtocolError: it is something else.
    """
    if len(packet) < _HEADER.size or _HEADER.unpack_from(packet)[0] != STATUS_REPLY:
        name, fields = decode(packet)
        raise ProtocolError(fields.get("text") or f"the broker answered with {name}")
    return packet[_HEADER.size :].decode()


def device_name(uuid: bytes) -> str:
    """Return a device's 16-byte UUID as the driver's tools print it."""
    h = uuid.hex()
    return f"GPU-{h[:8]}-{h[8:12]}-{h[12:16]}-{h[16:20]}-{h[20:]}"
