"""What a node's owner decides: the policy, and what jobs may have. Read from a TOML file and options."""

from __future__ import annotations

import grp
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from pymux.config import check_int, check_name, check_size, clip
from pymux.errors import ConfigError
from pymux.jobs import Limits
from pymux.policy import POLICIES

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


@dataclass(frozen=True, kw_only=True, slots=True)
class Rules:
    """How a broker treats jobs.

    Attributes:
        policy: name of one of `pymux.policy.POLICIES`.
        max_wait: seconds of waiting after which nobody overtakes a phase any more.
        unresponsive_after: seconds of silence after which a process is passed over.
        kill_unresponsive: whether it is also killed.
        allow_groups: Unix groups whose members may connect, beside the broker's own user.
        default: what a job may have that `jobs` does not name.
        jobs: what jobs may have, by name.
    """

    policy: str = "fifo"
    max_wait: float = 120.0
    unresponsive_after: float = 10.0
    kill_unresponsive: bool = False
    allow_groups: tuple[str, ...] = ()
    default: Limits = field(default_factory=Limits)
    jobs: dict[str, Limits] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.policy not in POLICIES:
            raise ConfigError(f"policy {clip(self.policy)}: use one of {', '.join(POLICIES)}.")
        for name in ("max_wait", "unresponsive_after"):
            if not 0 < getattr(self, name) < float("inf"):
                raise ConfigError(f"{name} = {getattr(self, name)!r}: give seconds, more than 0.")

    def group_ids(self) -> frozenset[int]:
        """Return the numbers of the allowed groups.

        Raises:
            ConfigError: there is no such group.
        """
        try:
            return frozenset(grp.getgrnam(name).gr_gid for name in self.allow_groups)
        except KeyError as e:
            raise ConfigError(f"allow_groups: {e.args[0]}.") from None


_TOP: dict[str, type | tuple[type, ...]] = {
    "policy": str,
    "max_wait": (int, float),
    "unresponsive_after": (int, float),
    "kill_unresponsive": bool,
    "allow_groups": list,
}


def load(path: Path) -> Rules:
    """Read a TOML file.

    Top-level keys are those of `Rules`; ``[default]`` and ``[jobs.NAME]`` have ``weight`` (a number), ``priority``
    (an integer, smaller is more urgent), ``device`` and ``host`` (sizes such as ``"20G"``).

    Raises:
        ConfigError: it cannot be read, or says something unknown.
    """
    try:
        data = tomllib.loads(path.read_text())
    except OSError as e:
        raise ConfigError(f"cannot read {path}: {e.strerror}.") from e
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as e:
        raise ConfigError(f"{path} is not TOML: {e}.") from e
    default = _limits(f"{path}: [default]", data.pop("default", {}), Limits())
    jobs = data.pop("jobs", {})
    if not isinstance(jobs, dict):
        raise ConfigError(f"{path}: jobs must be tables, [jobs.NAME].")
    limits = {name: _limits(f"{path}: [jobs.{name}]", table, default) for name, table in jobs.items()}
    for key, value in data.items():
        kind = _TOP.get(key)
        if kind is None:
            raise ConfigError(f"{path}: unknown key {key!r}; known are {', '.join([*_TOP, 'default', 'jobs'])}.")
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            raise ConfigError(f"{path}: {key} = {value!r} is of the wrong kind.")
    if "allow_groups" in data:
        data["allow_groups"] = tuple(map(str, data["allow_groups"]))
    return Rules(default=default, jobs=limits, **data)


def with_jobs(rules: Rules, options: Sequence[str]) -> Rules:
    """Return the rules with options such as ``"math:weight=2,device=20G"`` applied.

    Raises:
        ConfigError: an option is not of this form.
    """
    jobs = dict(rules.jobs)
    for option in options:
        name, colon, rest = option.rpartition(":")
        pairs = [p.partition("=") for p in rest.split(",")]
        if not colon or not name or not all(sep for _, sep, _ in pairs):
            raise ConfigError(f"--job {clip(option)}: write NAME:weight=2,priority=-1,device=20G,host=64G.")
        check_name("--job", name)
        table = {key.strip(): value.strip() for key, _, value in pairs}
        jobs[name] = _limits(f"--job {clip(option)}", table, jobs.get(name, rules.default))
    return replace(rules, jobs=jobs)


def _limits(where: str, table: Any, base: Limits) -> Limits:
    if not isinstance(table, dict):
        raise ConfigError(f"{where} must be a table.")
    known = ("weight", "priority", "device", "host")
    if unknown := [k for k in table if k not in known]:
        raise ConfigError(f"{where}: unknown key {unknown[0]!r}; known are {', '.join(known)}.")
    try:
        weight, priority = float(table.get("weight", base.weight)), int(table.get("priority", base.priority))
    except (TypeError, ValueError):
        raise ConfigError(f"{where}: weight is a number, and priority an integer.") from None
    if not 0 < weight < float("inf"):
        raise ConfigError(f"{where}: weight = {weight!r}: give a number greater than 0.")
    check_int(f"{where}: priority", priority, -(2**31), 2**31 - 1)
    device, host = (
        check_size(f"{where}: {k}", table[k]) if k in table else b
        for k, b in (("device", base.device_bytes), ("host", base.host_bytes))
    )
    return Limits(weight=weight, priority=priority, device_bytes=device, host_bytes=host)
