"""Who runs: leases, the queue, and which client gets pages. Sans-IO: events in, actions out.

Invariants: at most one lease a device; a lease over several devices is granted whole; generations
only grow, so a late message never touches a newer lease; a request that cannot be met is denied at
once; what a client did wrong is raised to the caller and changes nothing for the others.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from pymux.bank import RETRY_SECONDS, Account, Bank, Claim
from pymux.errors import ClientExists, DriverError, ProtocolError
from pymux.events import (
    Acquire,
    Action,
    Budget,
    Cancel,
    Deny,
    Event,
    Give,
    Grant,
    HostWant,
    Joined,
    Left,
    Ready,
    Recall,
    Release,
    Returned,
    Tick,
    Want,
)
from pymux.hostbudget import HostBudget
from pymux.policy import Policy, Request

GroupKey = tuple[str, str]

PATIENCE_SECONDS = 5.0  # how long a holder may lack pages that nobody can give, before it is told


@dataclass(slots=True)
class Client:
    """A connected process."""

    id: int
    job: str
    name: str
    group: GroupKey
    device: str
    want_seq: int = 0  # of the message that last told its want


@dataclass(slots=True)
class Group:
    """The clients that hold devices together."""

    key: GroupKey
    world: int
    members: dict[int, Client] = field(default_factory=dict)

    @property
    def devices(self) -> frozenset[str]:
        """The devices of the members."""
        return frozenset(c.device for c in self.members.values())

    @property
    def complete(self) -> bool:
        """Whether every member is connected."""
        return len(self.members) >= self.world


@dataclass(slots=True)
class Lease:
    """The right of a group to run on its devices."""

    group: GroupKey
    generation: int
    devices: frozenset[str]
    phase: str
    since: float
    recalled: bool = False
    ready: set[int] = field(default_factory=set)


class Scheduler:
    """Leases and pages of one node's devices.

    Args:
        policy: the order of the queue.
        host_budget: bytes of host memory that clients may pin.
        frozen_until: before this time nothing is granted or given, so that the clients of a
            broker that died can say what they hold.
    """

    def __init__(self, policy: Policy, *, host_budget: int, frozen_until: float = 0.0) -> None:
        self.policy = policy
        self.frozen_until = frozen_until
        self.clients: dict[int, Client] = {}
        self.groups: dict[GroupKey, Group] = {}
        self.banks: dict[str, Bank] = {}
        self.page_sizes: dict[str, int] = {}
        self.leases: dict[GroupKey, Lease] = {}
        self.queue: list[Request] = []
        self.generation = 0
        self.host = HostBudget(host_budget)
        self._short: dict[int, float] = {}  # holders that nobody can give pages, since when

    def add_device(self, device: str, page_size: int, budget: int, capacity: int) -> None:
        """Make a device known.

        Args:
            device: its UUID.
            page_size: bytes.
            budget: pages for clients now.
            capacity: pages for clients when nobody else uses the device.
        """
        self.banks[device] = Bank(budget, capacity)
        self.page_sizes[device] = page_size

    def next_deadline(self, now: float) -> float | None:
        """When a Tick is due, or None."""
        if now < self.frozen_until:
            return self.frozen_until
        return now + RETRY_SECONDS if self._short else None

    def handle(self, event: Event | Budget | Tick, now: float) -> list[Action]:
        """Take one event.

        Args:
            event: what happened.
            now: seconds.

        Raises:
            ClientExists: a client of this name is connected.
            DriverError: the client's page size is not the device's.
            ProtocolError: the client may not send this now.
        """
        out: list[Action] = []
        match event:
            case Budget(device=device, pages=pages):
                if device in self.banks:
                    self.banks[device].budget = pages
            case Tick():
                pass
            case Joined():
                self._join(event, now)
            case _ if event.client not in self.clients:
                return []  # a late message of one that is gone
            case Left(client=client):
                self._leave(client)
            case Acquire():
                self._acquire(event, now, out)
            case Cancel(client=client, seq=seq):
                self._drop_request(client, seq)
            case Release(client=client, generation=generation):
                self._release(client, generation, event, now)
            case Ready(client=client, generation=generation):
                lease = self._lease_of(client)
                if lease and lease.generation == generation:
                    lease.ready.add(client)
                    self._account(client).want = event.want
                    self._bank(client).runs(client, event.counts)
            case HostWant(client=client):
                self.host.ask(client, event.want, urgent=event.urgent)
            case Want():
                self._want(event, out)
            case Returned(client=client):
                account = self._account(client)
                self._bank(client).returned(client, event.count, event.missing, now)
                account.counts = event.counts
                account.want = event.want
            case _:
                raise ProtocolError(f"unknown event {event!r}")
        return out + self._advance(now)

    def describe(self, now: float) -> dict[str, Any]:
        """Everything a person wants to see, as plain data."""
        return {
            "policy": self.policy.name,
            "host": {"budget_bytes": self.host.budget, "free_bytes": self.host.free},
            "devices": [
                {
                    "uuid": device,
                    "page_size": self.page_sizes[device],
                    "budget_pages": bank.budget,
                    "free_pages": bank.free,
                    "lease": next(
                        (
                            {
                                "job": lease.group[0],
                                "group": lease.group[1],
                                "phase": lease.phase,
                                "generation": lease.generation,
                                "state": "recalled" if lease.recalled else "granted",
                                "seconds": now - lease.since,
                            }
                            for lease in self.leases.values()
                            if device in lease.devices
                        ),
                        None,
                    ),
                }
                for device, bank in self.banks.items()
            ],
            "queue": [
                {"job": r.group[0], "group": r.group[1], "phase": r.phase, "seconds": now - r.arrived}
                for r in self.policy.order(self.queue, now)
            ],
            "clients": [
                {
                    "job": c.job,
                    "name": c.name,
                    "device": c.device,
                    "pages_held": self._account(c.id).held,
                    "pages_wanted": self._account(c.id).want,
                    "discardable": self._account(c.id).counts.discardable,
                    "clean": self._account(c.id).counts.clean,
                    "dirty": self._account(c.id).counts.dirty,
                    "host_bytes": self.host.accounts[c.id].granted,
                }
                for c in self.clients.values()
            ],
        }

    # ---- events --------------------------------------------------------------------------------

    def _account(self, client: int) -> Account:
        return self._bank(client).accounts[client]

    def _bank(self, client: int) -> Bank:
        return self.banks[self.clients[client].device]

    def _lease_of(self, client: int) -> Lease | None:
        return self.leases.get(self.clients[client].group)

    def _join(self, e: Joined, now: float) -> None:
        if any(c.job == e.job and c.name == e.name for c in self.clients.values()):
            raise ClientExists(
                f"a client named '{e.name}' of job '{e.job}' is connected already. Give this process another "
                f"name: connect(job, name=...), or another job name."
            )
        if self.page_sizes[e.device] != e.page_size:
            raise DriverError(
                f"this device's clients use pages of {self.page_sizes[e.device]} bytes, not {e.page_size}. "
                f"Set PYMUX_PAGE_SIZE alike for all of them."
            )
        key = (e.job, e.group)
        group = self.groups.get(key)
        if group and (group.world != e.world or group.complete):
            raise ProtocolError(
                f"group '{e.group}' of job '{e.job}' has {len(group.members)} of {group.world} members; a member "
                f"with world={e.world} does not fit."
            )
        group = group or self.groups.setdefault(key, Group(key=key, world=e.world))
        client = Client(id=e.client, job=e.job, name=e.name, group=key, device=e.device)
        self.clients[e.client] = client
        group.members[e.client] = client
        self.banks[e.device].open(e.client, e.held, e.counts)
        self.host.open(e.client, e.host_pinned)
        self.queue = [replace(r, devices=group.devices) if r.group == key else r for r in self.queue]
        if e.lease_generation and not any(group.devices & lease.devices for lease in self.leases.values()):
            self.generation = max(self.generation, e.lease_generation)
            self.leases[key] = Lease(
                group=key,
                generation=e.lease_generation,
                devices=group.devices,
                phase="",
                since=now,
                ready={e.client},
            )

    def _leave(self, client: int) -> None:
        gone = self.clients[client]
        self._bank(client).close(client)
        self.host.close(client)
        self._short.pop(client, None)
        self.leases.pop(gone.group, None)
        self.queue = [r for r in self.queue if r.group != gone.group]
        group = self.groups[gone.group]
        del group.members[client]
        if not group.members:
            del self.groups[gone.group]
        del self.clients[client]

    def _acquire(self, e: Acquire, now: float, out: list[Action]) -> None:
        client = self.clients[e.client]
        if client.group in self.leases or any(r.group == client.group for r in self.queue):
            raise ProtocolError(f"client '{client.name}' asked for a lease that its group holds or waits for")
        self._note_want(e)
        self._bank(e.client).asked(e.client, now)
        self._account(e.client).unwilling_until = 0.0
        request = Request(
            group=client.group,
            client=e.client,
            seq=e.seq,
            phase=e.phase,
            devices=self.groups[client.group].devices,
            arrived=now,
            expected=e.expected,
        )
        if not self._deny_impossible(e, out):
            self.queue.append(request)

    def _want(self, e: Want, out: list[Action]) -> None:
        if self._lease_of(e.client) is None:
            return  # the lease was lost meanwhile; the client asks again
        self._note_want(e)
        self._deny_impossible(e, out)

    def _note_want(self, e: Acquire | Want) -> None:
        account = self._account(e.client)
        account.want, account.own, account.counts = e.want, e.own, e.counts
        self.clients[e.client].want_seq = e.seq

    def _deny_impossible(self, e: Acquire | Want, out: list[Action]) -> bool:
        bank = self._bank(e.client)
        if e.want - e.own <= bank.capacity:
            return False
        out.append(self._denial(e.client, capacity=True))
        return True

    def _denial(self, client: int, *, capacity: bool) -> Deny:
        bank, account = self._bank(client), self._account(client)
        size = self.page_sizes[self.clients[client].device]
        need, mib = account.want - account.own, size / 2**20
        job = self.clients[client].job
        if capacity:
            text = (
                f"job '{job}' needs {need * mib:.0f} MiB on the device at once, and the device has "
                f"{bank.capacity * mib:.0f} MiB for regions. Use fewer regions in this phase (uses=...), a smaller "
                f"model or batch, or a larger device."
            )
        else:
            text = (
                f"job '{job}' lacks {(account.want - account.held) * mib:.0f} of the {need * mib:.0f} MiB it needs. "
                f"The device has {bank.budget * mib:.0f} of {bank.capacity * mib:.0f} MiB for regions now, and no "
                f"other client can give pages: others outside pymux use the device, or the host has no room "
                f"to swap out. "
                f"'pymux status' shows who holds what."
            )
        account.want = 0
        seq = self.clients[client].want_seq
        return Deny(client=client, seq=seq, need=need, budget=bank.capacity, capacity=capacity, text=text)

    def _drop_request(self, client: int, seq: int) -> None:
        mine = [r for r in self.queue if r.client == client and r.seq == seq]
        if mine:
            self.queue.remove(mine[0])
            self._account(client).want = 0

    def _release(self, client: int, generation: int, e: Release, now: float) -> None:
        account = self._account(client)
        account.counts = e.counts
        lease = self._lease_of(client)
        if lease is None or lease.generation != generation:
            return
        for member in self.groups[lease.group].members:
            self._account(member).want = 0
            self._bank(member).ended(member, now)
            self._account(member).unwilling_until = 0.0
            self._short.pop(member, None)
        del self.leases[lease.group]

    # ---- decisions -----------------------------------------------------------------------------

    def _advance(self, now: float) -> list[Action]:
        if now < self.frozen_until:
            return []
        out: list[Action] = []
        order = self.policy.order(self.queue, now)
        busy = frozenset[str]().union(*(lease.devices for lease in self.leases.values()))
        heirs: dict[str, Request] = {}
        for request in order:
            group = self.groups[request.group]
            if not group.complete:
                continue
            if request.devices & busy or any(d in heirs for d in request.devices):
                for device in request.devices:
                    heirs.setdefault(device, request)
                continue
            busy |= request.devices
            out += self._grant(request, now)
        for lease in self.leases.values():
            if not lease.recalled and any(d in heirs for d in lease.devices):
                lease.recalled = True
                out += [Recall(client=m, generation=lease.generation) for m in self.groups[lease.group].members]
        for device, bank in self.banks.items():
            out += self._plan(device, bank, heirs.get(device), order, now)
        out += self.host.plan({c for bank in self.banks.values() if len(bank.accounts) > 1 for c in bank.accounts})
        return out

    def _grant(self, request: Request, now: float) -> list[Action]:
        self.queue.remove(request)
        self.generation += 1
        self.leases[request.group] = Lease(
            group=request.group,
            generation=self.generation,
            devices=request.devices,
            phase=request.phase,
            since=now,
        )
        return [
            Grant(client=m, seq=request.seq if m == request.client else 0, generation=self.generation)
            for m in self.groups[request.group].members
        ]

    def _members_on(self, group: GroupKey, device: str) -> list[int]:
        return [c.id for c in self.groups[group].members.values() if c.device == device]

    def _plan(self, device: str, bank: Bank, heir: Request | None, order: list[Request], now: float) -> list[Action]:
        lease = next((x for x in self.leases.values() if device in x.devices), None)
        holders = self._members_on(lease.group, device) if lease else []
        next_up = self._members_on(heir.group, device) if heir else []
        waiting = [c for r in order if r.group in self.groups for c in self._members_on(r.group, device)]
        # What a running phase does not use is its heir's; until it runs, nobody knows.
        running = frozenset(c for c in holders if lease and c in lease.ready)
        spared = frozenset(holders)
        both = (spared - running) | frozenset(next_up)
        claims = [Claim(client=c, spared=spared, last=frozenset(next_up)) for c in holders]
        claims += [Claim(client=c, spared=both, running=running, holders=spared) for c in next_up]
        plan = bank.plan(claims, now, waiting)
        out: list[Action] = list(plan.actions)
        # A shortage may pass: a dying process still has memory, a budget is about to be read anew, a
        # client that could not give is asked again. It has lasted since the claimant last got a page.
        given = {a.client for a in plan.actions if isinstance(a, Give)}
        for c in holders:
            if c in given or bank.accounts[c].want <= bank.accounts[c].held:
                self._short.pop(c, None)
            if c in plan.short:
                self._short.setdefault(c, now)
            if now - self._short.get(c, now) >= PATIENCE_SECONDS:
                del self._short[c]
                out.append(self._denial(c, capacity=False))
        return out
