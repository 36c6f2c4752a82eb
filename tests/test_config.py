"""Settings."""

import pytest

from pymux.config import load, parse_size
from pymux.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("4096", 4096),
        ("2M", 2 << 20),
        ("2 MiB", 2 << 20),
        ("1.5g", 3 << 29),
        ("32mb", 32 << 20),
        ("1KiB", 1024),
        ("7b", 7),
    ],
)
def test_sizes_are_read_as_people_write_them(text, size):
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "M", "two", "-1M", "0", "1X", "1MM"])
def test_what_is_no_size_is_refused(text):
    with pytest.raises(ConfigError, match="size"):
        parse_size(text)


def test_the_runtime_directory_follows_the_session(monkeypatch):
    monkeypatch.delenv("PYMUX_RUNTIME_DIR")
    monkeypatch.setenv("XDG_RUNTIME_DIR", "/run/user/1")
    assert str(load().socket) == "/run/user/1/pymux/broker.sock"
    monkeypatch.delenv("XDG_RUNTIME_DIR")
    assert str(load().runtime_dir).startswith("/tmp/pymux-")
