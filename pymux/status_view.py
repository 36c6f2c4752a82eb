"""What ``pymux status`` prints, made from the broker's answer.

What it is not: stable; scripts read ``--json`` (docs/status.md).

Invariants: 80 columns are enough for names of usual length, longer ones are folded; where it does not go to a terminal
there are no colours, no boxes and no folds.
"""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

_MIB = 2**20
_REGION_COLUMNS = {
    "on device": "resident",
    "dirty": "dirty",
    "evicted": "evicted",
    "spilled": "spilled",
    "lost": "lost",
    "out": "copied_out",
    "in": "copied_in",
    "avoided": "avoided",
}


def show(data: dict[str, Any], console: Console) -> None:
    """Print the devices, who holds and who waits, and memory by process and region."""
    plain = Console(width=100_000, color_system=None, highlight=False, file=console.file)
    out = console if console.is_terminal else plain

    def line(text: str, indent: int = 0) -> None:
        out.print(Padding(Text(text), (0, 0, 0, indent), expand=False))

    for d in data["devices"]:
        mib = d["page_size"] / _MIB
        out.print(Text(f"device {d['uuid']}", style="bold"))
        line(f"{d['budget_pages'] * mib:.0f} MiB for regions, {d['free_pages'] * mib:.0f} free", 2)
        for x in d["leases"]:
            line(f"held by {x['job']} in {x['phase'] or '?'} ({x['state']}, {x['seconds']:.1f} s)", 2)
        if not d["leases"]:
            line("held by nobody", 2)
        clients = [c for c in data["clients"] if c["device"] == d["uuid"]]
        if clients:
            out.print(_processes(clients, mib))
        if any(c["regions"] for c in clients):
            out.print(_regions(clients))
    for i, r in enumerate(data["queue"], 1):
        line(f"{i}. {r['job']} waits for {r['phase']}, {r['seconds']:.1f} s. {r['missing']}".rstrip())
    if data["jobs"]:
        out.print(_jobs(data))
    host = data["host"]
    spill = f", then {data['spill_dir']}" if data["spill_dir"] else ""
    line(
        f"host memory for swapped-out pages: {host['budget_bytes'] / _MIB:.0f} MiB, "
        f"{host['free_bytes'] / _MIB:.0f} free{spill}"
    )
    if not data["devices"]:
        line(f"broker {data['pid']}: no devices yet")


def _table(first: str, *numbers: str) -> Table:
    table = Table(box=None, pad_edge=False, show_edge=False, collapse_padding=True)
    table.add_column(first, overflow="fold")
    for name in numbers:
        table.add_column(name, justify="right", no_wrap=True)
    return table


def _processes(clients: list[dict[str, Any]], mib: float) -> Table:
    table = _table("process, MiB", "pid", "holds", "wants", "free", "clean", "dirty", "host")
    for c in clients:
        pages = [c[k] * mib for k in ("pages_held", "pages_wanted", "discardable", "clean", "dirty")]
        pid = str(c["pid"]) if c["responsive"] else f"{c['pid']} (silent)"
        table.add_row(f"{c['job']}/{c['name']}", pid, *(f"{x:.0f}" for x in (*pages, c["host_bytes"] / _MIB)))
    return table


def _regions(clients: list[dict[str, Any]]) -> Table:
    table = _table("region, MiB", *_REGION_COLUMNS)
    for c in clients:
        for name, region in c["regions"].items():
            cells = [region[f"{key}_bytes"] / _MIB for key in _REGION_COLUMNS.values()]
            table.add_row(f"{c['job']}/{c['name']} {name}", *(f"{x:.0f}" for x in cells))
    return table


def _jobs(data: dict[str, Any]) -> Table:
    table = _table(f"job (policy {data['policy']})", "weight", "priority", "slowdown")
    for j in data["jobs"]:
        table.add_row(j["name"], f"{j['weight']:g}", str(j["priority"]), f"{j['slowdown']:.2f}")
    return table
