"""Settings from the environment, read here and nowhere else.

The simulated driver reads its own settings; the README lists them all.
"""

from __future__ import annotations

import operator
import os
import re
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pymux.errors import ConfigError

_SUFFIXES = {"": 1, "k": 2**10, "m": 2**20, "g": 2**30, "t": 2**40}
_SIZE = re.compile(r"([0-9]+\.?[0-9]*(?:e\+?[0-9]+)?|\.[0-9]+)\s*([kmgt]?)(?:i?b)?")
MAX_BYTES = 1 << 60  # of anything
PAGE_STEP = 2 << 20  # bytes; pages of every device are multiples of it
MAX_SOCKET_PATH = 107  # bytes, of any Unix socket
MAX_NAME = 63  # bytes; the messages have room for so many
_MAX_DEVICES = 64


def clip(value: object, most: int = 60) -> str:
    """A value as an error message shows it: its repr, cut where it is long."""
    text = repr(value)
    return text if len(text) <= most else f"{text[: most - 4]}... ({len(text)} characters)"


def parse_size(size: int | str) -> int:
    """Return bytes for ``"2M"``, ``"1.5GiB"``, ``"4096"`` or ``4096``.

    Raises:
        ConfigError: it is not a positive size.
    """
    if isinstance(size, str):
        match = _SIZE.fullmatch(size.strip().lower())
        value = float(match[1]) * _SUFFIXES[match[2]] if match else 0.0
    elif isinstance(size, int) and not isinstance(size, bool):
        value = size
    else:
        value = 0
    if not 1 <= value <= MAX_BYTES:
        raise ConfigError(
            f"{clip(size)} is not a size; write bytes or a positive number with K, M, G or T, such as '512M'."
        )
    return int(value)


def check_size(what: str, size: int | str) -> int:
    """Return the bytes of an argument; 0, which says nothing, is one too.

    Raises:
        ConfigError: it is not a size.
    """
    if isinstance(size, int | str) and not isinstance(size, bool) and str(size).strip() == "0":
        return 0
    try:
        return parse_size(size)
    except ConfigError as e:
        raise ConfigError(f"{what}: {e}") from None


def check_name(what: str, value: str) -> None:
    """Raise ConfigError unless `value` can name a job, a process, a group, a region or a phase."""
    if not isinstance(value, str) or not value or len(value.encode(errors="replace")) > MAX_NAME:
        raise ConfigError(f"{what}={clip(value)}: give a name of 1 to {MAX_NAME} bytes.")
    if not value.isprintable():
        raise ConfigError(f"{what}={clip(value)}: give a name of one line, without control characters.")


def check_names(what: str, names: Iterable[str]) -> tuple[str, ...]:
    """Return several names as a tuple.

    Raises:
        ConfigError: it is a single text, or has something else in it.
    """
    if isinstance(names, str):
        raise ConfigError(f"{what}={clip(names)}: give a list of names, such as {what}=({clip(names, 30)},).")
    try:
        out = tuple(names)
    except TypeError:
        out = (None,)  # type: ignore[assignment]
    if not all(isinstance(n, str) for n in out):
        raise ConfigError(f"{what}={clip(names)}: give a list of regions' names, such as {what}=('weights',).")
    return out


def check_seconds(what: str, value: float) -> float:
    """Return a length of time.

    Raises:
        ConfigError: it is no number, or negative.
    """
    if isinstance(value, bool) or not isinstance(value, int | float) or not value >= 0:
        raise ConfigError(f"{what}={clip(value)}: give seconds, such as 2.5.")
    return float(value)


def check_int(what: str, value: Any, least: int, most: int) -> int:
    """Return an integer between two bounds.

    Raises:
        ConfigError: it is something else.
    """
    try:
        number = operator.index(value)
    except TypeError:
        number = least - 1
    if isinstance(value, bool) or not least <= number <= most:
        raise ConfigError(f"{what}={clip(value)}: give an integer from {least} to {most}.")
    return number


def check_choice(what: str, value: str | None, choices: tuple[str, ...]) -> None:
    """Raise ConfigError unless `value` is one of `choices`, or None."""
    if value is not None and value not in choices:
        raise ConfigError(f"{what}={clip(value)}: use {' or '.join(map(repr, choices))}.")


def _variable(name: str) -> str:
    return os.environ.get(name, "").strip()


def _flag(name: str, default: bool) -> bool:
    value = _variable(name).lower()
    if value not in {"", "0", "1", "true", "false"}:
        raise ConfigError(f"{name}={clip(value)}: use 0 or 1.")
    return default if not value else value in {"1", "true"}


def _size(name: str) -> int:
    text = _variable(name)
    try:
        return parse_size(text) if text else 0
    except ConfigError as e:
        raise ConfigError(f"{name}: {e}") from None


def _page_size() -> int:
    size = _size("PYMUX_PAGE_SIZE")
    if size % PAGE_STEP or size > 1 << 30:
        raise ConfigError(
            f"PYMUX_PAGE_SIZE={clip(_variable('PYMUX_PAGE_SIZE'))}: use a multiple of 2M, up to 1G, such as '32M'."
        )
    return size


def _runtime_dir() -> Path:
    name = next((n for n in ("PYMUX_RUNTIME_DIR", "XDG_RUNTIME_DIR") if _variable(n)), "")
    if not name:
        return Path(f"/tmp/pymux-{os.getuid()}")  # noqa: S108 - 0700, and its owner is checked
    path = Path(_variable(name)).absolute()
    path = path if name == "PYMUX_RUNTIME_DIR" else path / "pymux"
    if len(os.fsencode(path / "broker.sock")) > MAX_SOCKET_PATH:
        raise ConfigError(
            f"{name} is too long for a socket's path: {clip(str(path), 80)}. Use one of at most "
            f"{MAX_SOCKET_PATH - len('/broker.sock')} bytes, such as '/tmp/pymux'."
        )
    for at in (path, *path.parents):
        if at.exists():
            if not at.is_dir():
                raise ConfigError(f"{name}: {clip(str(at), 80)} is not a directory. Use one that is, or a new name.")
            break
    return path


def _check_simulator() -> None:
    """Look at what the simulated driver reads, which cannot explain itself."""
    for name in ("PYMUX_SIM_CAPACITY", "PYMUX_SIM_LINK"):
        _size(name)
    if 0 < _size("PYMUX_SIM_CAPACITY") < PAGE_STEP:
        raise ConfigError(f"PYMUX_SIM_CAPACITY={clip(_variable('PYMUX_SIM_CAPACITY'))}: at least 2M, such as '512M'.")
    devices = _variable("PYMUX_SIM_DEVICES")
    if devices and not (devices.isdecimal() and 1 <= int(devices) <= _MAX_DEVICES):
        raise ConfigError(f"PYMUX_SIM_DEVICES={clip(devices)}: give a number from 1 to {_MAX_DEVICES}, such as 2.")
    failures = _variable("PYMUX_SIM_FAIL")
    if failures and not re.fullmatch(r"(?:(?:^|,)cu\w+:[1-9]\d*:(?:\d+|kill)(?::forever)?)+", failures):
        raise ConfigError(
            f"PYMUX_SIM_FAIL={clip(failures)}: write CALL:N:CODE, such as 'cuMemCreate:3:2' or 'cuMemCreate:3:kill'."
        )
    home = Path(_variable("PYMUX_SIM_DIR") or f"/dev/shm/pymux-sim-{os.getuid()}")  # noqa: S108 - the simulator's own
    if not (home.is_dir() and os.access(home, os.W_OK | os.X_OK)):
        parent = home.parent
        if home.exists() or not (parent.is_dir() and os.access(parent, os.W_OK | os.X_OK)):
            raise ConfigError(
                f"PYMUX_SIM_DIR: {clip(str(home), 80)} cannot be made or written to. Use a directory in one that "
                f"is there, such as '/dev/shm/my-node'."
            )


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
    driver = _variable("PYMUX_DRIVER")
    if driver in {"", "sim"}:
        _check_simulator()
    elif "/" in driver and not Path(driver).is_file():
        raise ConfigError(
            f"PYMUX_DRIVER={clip(driver)}: there is no such library. Use 'sim', a path, or leave it empty."
        )
    if job := _variable("PYMUX_JOB"):
        check_name("PYMUX_JOB", job)
    spill, rules = _variable("PYMUX_SPILL_DIR"), _variable("PYMUX_BROKER_CONFIG")
    return Settings(
        driver=driver,
        runtime_dir=_runtime_dir(),
        page_size=_page_size(),
        capacity=_size("PYMUX_CAPACITY"),
        host_budget=_size("PYMUX_HOST_BUDGET"),
        spill_dir=Path(spill) if spill else None,
        broker_config=Path(rules) if rules else None,
        pass_pages=_flag("PYMUX_PASS_PAGES", default=True),
        run="PYMUX_RUN" in os.environ,
        job=job or Path(sys.argv[0] or "python").stem[:MAX_NAME] or "python",
        check=_flag("PYMUX_CHECK", default=False),
        expandable_segments=any(
            "expandable_segments:true" in os.environ.get(name, "").lower()
            for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
        ),
    )
