"""pymux status: for a person at 80 columns, for a pipe, and for a script."""

import json
import os
import pty
import re
import subprocess
import sys

from tests.conftest import ROOT, hear

JOB = """
mux = pymux.connect(os.environ["NAME"])
with mux.phase("fill"):
    blocks = [mux.region(n).allocate(PAGE) for n in ("weights", "optimizer", "kv_cache")]
holder = mux.phase("rollout"); holder.__enter__()
say("in")
hear()
"""


def busy(node):
    a = node.start(JOB, NAME="math-grpo-7b-on-h200")
    assert hear(a) == "in"
    b = node.start(JOB, NAME="code-grpo")
    node.until(lambda s: s["queue"])
    return a, b


def status(node, *options, columns=None):
    """Its output; on a terminal of so many columns, or through a pipe."""
    command = [sys.executable, "-m", "pymux.cli", "status", *options]
    env = {**node.env, "TERM": "xterm-256color", "COLUMNS": str(columns or 80)}
    if columns is None:
        return subprocess.run(command, env=env, capture_output=True, text=True, check=True).stdout
    ours, theirs = pty.openpty()
    process = subprocess.Popen(command, env=env, stdout=theirs, stderr=theirs)
    os.close(theirs)
    out = b""
    while True:
        try:
            part = os.read(ours, 65536)
        except OSError:  # the other end is closed
            break
        if not part:
            break
        out += part
    os.close(ours)
    assert process.wait() == 0, out
    return out.decode()


def test_it_reads_at_eighty_columns(node):
    _ = busy(node)
    out = re.sub(r"\x1b\[[0-9;]*m", "", status(node, columns=80))
    lines = [line.rstrip() for line in out.splitlines()]
    assert max(map(len, lines)) <= 80
    assert "…" not in out
    for word in ("process, MiB", "pid", "holds", "wants", "on device", "evicted", "avoided", "slowdown"):
        assert word in out, word
    assert "held by math-grpo-7b-on-h200 in " in out
    assert "1. code-grpo waits for fill" in out


def test_it_pipes_without_boxes_colours_or_folds(node):
    _ = busy(node)
    out = status(node)
    assert out.isascii(), set(out) - set(map(chr, range(128)))
    assert "\x1b" not in out
    row = next(line for line in out.splitlines() if "math-grpo-7b-on-h200/main weights" in line)
    assert row.split()[-8:] == ["2", "2", "0", "0", "0", "0", "0", "0"]


def keys(data, at=""):
    if isinstance(data, list):
        return set().union(*(keys(x, f"{at}[]") for x in data)) if data else set()
    if not isinstance(data, dict):
        return set()
    found = set()
    for key, value in data.items():
        name = "*" if at == ".clients[].regions" else key
        found |= {f"{at}.{name}"} | keys(value, f"{at}.{name}")
    return found


def test_the_page_of_what_json_has_is_whole(node):
    _ = busy(node)
    data = json.loads(status(node, "--json"))
    text = (ROOT / "docs" / "status.md").read_text()
    names = {k.rsplit(".", 1)[1].removesuffix("[]") for k in keys(data)} - {"*", "host"}
    assert {n for n in names if f"`{n}" not in text and f".{n}" not in text} == set()
    documented = set(re.findall(r"`(?:host\.)?([a-z_]+)`", text.split("| --- |")[1]))
    assert documented - names - {"host", "page_size"} == set(), "and nothing is told that is not there"
