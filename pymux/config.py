"""Settings from the environment, read here and nowhere else.

The simulated driver reads its own settings; the README lists them all.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path

from pymux.errors import ConfigError

_SUFFIXES = {"": 1, "b": 1, "k": 2**10, "m": 2**20, "g": 2**30, "t": 2**40}


def parse_size(text: str) -> int:
    """Return bytes for ``"2M"``, ``"1.5GiB"``, ``"4096"``.

    Raises:
        ConfigError: the text is not a positive size.
    """
    word = text.strip().lower().removesuffix("ib") if text.strip().lower().endswith("ib") else text.strip().lower()
    number = word.rstrip("bkmgt")
    try:
        value = float(number) * _SUFFIXES[word[len(number) :].removesuffix("b") or ""]
    except (ValueError, KeyError):
        raise ConfigError(
            f"{text!r} is not a size; write bytes or a number with K, M, G or T, such as '512M'."
        ) from None
    if value <= 0:
        raise ConfigError(f"{text!r} is not a positive size.")
    return int(value)


def check_name(what: str, value: str) -> None:
    """Raise ConfigError unless `value` can name a job, a process or a group."""
    if not value or len(value.encode()) > 63 or "\0" in value:
        raise ConfigError(f"{what}={value!r}: give a name of 1 to 63 bytes.")


def _flag(name: str, default: bool) -> bool:
    value = os.environ.get(name, "").strip().lower()
    if value not in {"", "0", "1", "true", "false"}:
        raise ConfigError(f"{name}={value!r}: use 0 or 1.")
    return default if not value else value in {"1", "true"}


def _size(name: str) -> int:
    text = os.environ.get(name)
    return parse_size(text) if text else 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """What the environment says.

    Attributes:
        driver: ``PYMUX_DRIVER``: empty for the machine's driver or else the simulated one,
            ``"sim"``, or the path of a driver library.
        runtime_dir: ``PYMUX_RUNTIME_DIR``: where the broker's socket, lock and log are.
        page_size: ``PYMUX_PAGE_SIZE`` in bytes; 0 lets the device decide.
        capacity: ``PYMUX_CAPACITY``: bytes of each device that regions may have, for the broker;
            0: all that others leave.
        host_budget: ``PYMUX_HOST_BUDGET``: bytes of host memory that the node's jobs may pin, for the
            broker; 0: four fifths of it.
        spill_dir: ``PYMUX_SPILL_DIR``: directory for what the host has no memory for, for the broker;
            None: nowhere.
        broker_config: ``PYMUX_BROKER_CONFIG``: TOML file with the policy and what jobs may have, for the broker;
            None: as it is built in.
        pass_pages: ``PYMUX_PASS_PAGES``: hand physical pages over instead of freeing and creating.
        run: ``PYMUX_RUN``: whether this process was started by ``pymux run``, which sets it.
        job: ``PYMUX_JOB``: name of the job, where the code does not say one; else the script's name.
        check: ``PYMUX_CHECK``: raise RegionNotResident before a tensor is touched without a lease.
        expandable_segments: whether torch's settings ask for them, which regions cannot hold.
    """

    driver: str
    runtime_dir: Path
    page_size: int
    capacity: int
    host_budget: int
    spill_dir: Path | None
    broker_config: Path | None
    pass_pages: bool
    run: bool
    job: str
    check: bool
    expandable_segments: bool

    @property
    def socket(self) -> Path:
        """The broker's socket."""
        return self.runtime_dir / "broker.sock"


def load() -> Settings:
    """Read the environment.

    Raises:
        ConfigError: a variable has no usable value.
    """
    base = os.environ.get("PYMUX_RUNTIME_DIR")
    if base:
        runtime_dir = Path(base)
    elif xdg := os.environ.get("XDG_RUNTIME_DIR"):
        runtime_dir = Path(xdg) / "pymux"
    else:
        runtime_dir = Path(f"/tmp/pymux-{os.getuid()}")  # noqa: S108 - 0700, and its owner is checked
    return Settings(
        driver=os.environ.get("PYMUX_DRIVER", ""),
        runtime_dir=runtime_dir,
        page_size=_size("PYMUX_PAGE_SIZE"),
        capacity=_size("PYMUX_CAPACITY"),
        host_budget=_size("PYMUX_HOST_BUDGET"),
        spill_dir=Path(spill) if (spill := os.environ.get("PYMUX_SPILL_DIR")) else None,
        broker_config=Path(rules) if (rules := os.environ.get("PYMUX_BROKER_CONFIG")) else None,
        pass_pages=_flag("PYMUX_PASS_PAGES", default=True),
        run="PYMUX_RUN" in os.environ,
        job=os.environ.get("PYMUX_JOB") or Path(sys.argv[0] or "python").stem[:63] or "python",
        check=_flag("PYMUX_CHECK", default=False),
        expandable_segments=any(
            "expandable_segments:true" in os.environ.get(name, "").lower()
            for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
        ),
    )
