"""Who is connected: clients, the groups and jobs they form, and what each job may have. Pure.

Invariants: a client is in one group and one job; a name is taken once in a job; a group that lost a member
is refused what it asks for until it is whole again.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypedDict

from pymux.bank import Bank
from pymux.errors import CapacityError, ClientExists, ConfigError, DriverError, HostOutOfMemory
from pymux.events import Joined
from pymux.jobs import Job, Limits
from pymux.lease import GroupKey


@dataclass(slots=True, eq=False)
class Group:
    """The clients that hold devices together."""

    key: GroupKey
    joint: bool  # its members hold devices together; else it is one process alone
    world: int = 0  # members with a device; 0: no such one has come yet
    members: dict[int, Client] = field(default_factory=dict)
    refused: str = ""  # what to tell who asks after a process came that did not fit, until the group is whole
    lost: str = ""  # what to tell who asks while a member that was there is not

    @property
    def responsive(self) -> bool:
        """Whether no member is passed over."""
        return all(c.responsive for c in self.members.values())

    @property
    def ready(self) -> bool:
        """Whether every member is connected and answers."""
        return self.world > 0 and len(self.workers) == self.world and self.responsive

    @property
    def missing(self) -> str:
        """Who of the group has not come, and what to do; nothing when all are here, or one is lost."""
        if self.lost or len(self.workers) == self.world > 0:
            return ""
        if not self.world:
            return f"No member of group '{self.key[1]}' of job '{self.key[0]}' that has a device is connected."
        here = {c.rank for c in self.workers}
        ranks = [r for r in range(self.world) if r not in here]
        some = ", ".join(map(str, ranks[:8])) + (", ..." if len(ranks) > 8 else "")
        job, group = self.key
        return (
            f"Of group '{group}' of job '{job}' rank {some} of {self.world} is not connected: start it, or "
            f"connect() with the right world=."
        )

    @property
    def workers(self) -> list[Client]:
        """The members that have a device."""
        return [c for c in self.members.values() if c.device]


@dataclass(slots=True, eq=False)
class Client:
    """A connected process; `device` is empty for a controller."""

    id: int
    name: str
    job: Job
    group: Group
    device: str
    rank: int
    heard: float
    process: int  # its pid; if unknown, a number that no other client has
    want_seq: int = 0  # of the message that last told its want
    pinged: float = 0.0  # 0: not since it was heard
    responsive: bool = True


class PageBudget(TypedDict):
    """What a bank's claim says of the job's budget."""

    limit: int | None
    kin: frozenset[int]


NO_BUDGET: PageBudget = {"limit": None, "kin": frozenset()}


class Members:
    """The clients of a node.

    Args:
        banks: of the devices.
        limits: of jobs, by name.
        default: of jobs that are not named.
        host_budget: bytes of pinned host memory on the node.
    """

    def __init__(
        self, banks: Mapping[str, Bank], limits: Mapping[str, Limits], default: Limits, host_budget: int
    ) -> None:
        self.clients: dict[int, Client] = {}
        self.groups: dict[GroupKey, Group] = {}
        self.jobs: dict[str, Job] = {}
        self._limited: dict[str, Job] = {}  # of these, those with a page budget
        self._banks = banks
        self._limits = limits
        self._default = default
        self._host_budget = host_budget

    def join(self, e: Joined, now: float) -> Client:
        """Count a client in.

        Raises:
            CapacityError: it needs more device memory than its job may have.
            ClientExists: its name is taken.
            DriverError: its pages have another size than the device's.
            HostOutOfMemory: it needs more host memory than its job may have.
            ConfigError: it does not fit its group.
        """
        job = self.jobs.get(e.job) or Job(name=e.job, limits=self._limits.get(e.job, self._default), at=now)
        if any(self.clients[c].name == e.name for c in job.clients):
            raise ClientExists(
                f"a client named '{e.name}' of job '{e.job}' is connected already. Give this process another "
                f"name: connect(job, name=...), or another job name."
            )
        if e.device:
            self._admit(e, job.limits)
        key = (e.job, e.group)
        group = self.groups.get(key) or Group(key=key, joint=e.joint)
        workers = group.workers
        if (
            group.joint != e.joint
            or (not group.joint and group.members)
            or (e.device and ((group.world or e.world) != e.world or len(workers) >= e.world))
        ):
            text = (
                f"group '{e.group}' of job '{e.job}' has {len(workers)} of {group.world} members; '{e.name}' (rank "
                f"{e.rank}) with world={e.world} does not fit. All its members say the same world=, and each a rank= "
                f"of its own."
            )
            if len(workers) < group.world:  # those who wait for it hear it too
                group.refused = text
            raise ConfigError(text)
        if e.device and e.rank in {c.rank for c in workers}:
            raise ConfigError(f"group '{e.group}' of job '{e.job}' has a member of rank {e.rank} already.")
        client = Client(id=e.client, name=e.name, job=job, group=group, device=e.device, rank=e.rank, heard=now,
                        process=e.process or -e.client)  # fmt: skip
        self.clients[e.client] = client
        self.groups[key] = group
        self.jobs[e.job] = job
        if job.limits.device_bytes:
            self._limited[e.job] = job
        group.members[e.client] = client
        job.clients.add(e.client)
        if e.device:
            group.world = e.world
            if len(workers) + 1 == group.world:
                group.lost = group.refused = ""
        return client

    def _admit(self, e: Joined, limits: Limits) -> None:
        bank = self._banks[e.device]
        if bank.page_size != e.page_size:
            raise DriverError(
                f"this device's clients use pages of {bank.page_size} bytes, not {e.page_size}. "
                f"Set PYMUX_PAGE_SIZE alike for all of them."
            )
        for what, need, has, mine, error in (
            ("of device memory", e.need, bank.capacity * bank.page_size, limits.device_bytes, CapacityError),
            ("of host memory", e.host_need, self._host_budget, limits.host_bytes, HostOutOfMemory),
        ):
            most = min(has, mine) if mine else has
            if need > most:
                whose = "the job may have" if mine and mine < has else "there are"
                problem = error(
                    f"job '{e.job}' says that it needs {need / 2**20:.0f} MiB {what}, and {whose} "
                    f"{most / 2**20:.0f} MiB. It can never run here: give it more in the broker's configuration, "
                    f"or make it smaller."
                )
                problem.need, problem.limit = need, most
                raise problem

    def leave(self, client: Client) -> None:
        """Count a client out."""
        group, job = client.group, client.job
        if group.joint and client.device and len(group.workers) == group.world:
            group.lost = (
                f"'{client.name}' (rank {client.rank} of group '{group.key[1]}' of job '{job.name}') is gone. Start it "
                f"again: the group's phases need all {group.world} members."
            )
        del group.members[client.id]
        if not group.members:
            del self.groups[group.key]
        job.clients.discard(client.id)
        if not job.clients:
            del self.jobs[job.name]
            self._limited.pop(job.name, None)
        del self.clients[client.id]

    def page_limit(self, client: Client) -> int | None:
        """Pages that the client's job may have on its device, or None where nothing limits it."""
        size = client.job.limits.device_bytes
        return size // self._banks[client.device].page_size if size else None

    def page_budgets(self, device: str) -> dict[int, PageBudget]:
        """For the clients of limited jobs on a device: the limit, and who shares it."""
        out: dict[int, PageBudget] = {}
        for job in self._limited.values():
            kin = frozenset(c for c in job.clients if self.clients[c].device == device)
            limit = job.limits.device_bytes // self._banks[device].page_size
            out |= {c: {"limit": limit, "kin": kin} for c in kin}
        return out

    def host_key(self, client: Client) -> tuple[str, int]:
        """Under which a client's pinned host memory is limited, and to how many bytes (0: not)."""
        return client.job.name, client.job.limits.host_bytes

    def describe(self, now: float) -> list[dict[str, Any]]:
        """The jobs, as plain data."""
        out = []
        for job in self.jobs.values():
            job.advance(now)
            out.append(
                {
                    "name": job.name,
                    "weight": job.limits.weight,
                    "priority": job.limits.priority,
                    "device_limit_bytes": job.limits.device_bytes,
                    "host_limit_bytes": job.limits.host_bytes,
                    "slowdown": job.elapsed / (job.elapsed - job.blocked) if job.elapsed > job.blocked else 1.0,
                }
            )
        return out
