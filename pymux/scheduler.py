"""Who runs: leases, the queue, and which client gets pages. Sans-IO: events in, actions out.

Invariants: leases that occupy a device are alone there, but for phases that allow overlap and fit; a lease
over several devices is granted whole; generations only grow, so a late message never touches a newer
lease; a request that cannot be met is denied at once; what a client did wrong is raised to the caller
and changes nothing for the others.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import inf
from typing import Any

from pymux.bank import RETRY_SECONDS, Account, Bank
from pymux.deadlocks import Deadlocks, Opener, Wait, explain, label
from pymux.dispatch import Dispatcher
from pymux.errors import ProtocolError
from pymux.estimator import Durations, SwitchCost
from pymux.events import (
    Acquire,
    Action,
    Active,
    Budget,
    Cancel,
    Deny,
    Drain,
    Ended,
    Event,
    Failed,
    Fenced,
    Grant,
    HostWant,
    Joined,
    Kept,
    Left,
    Notice,
    Ping,
    Pong,
    Prepare,
    Promise,
    Queued,
    Ran,
    Ready,
    Recall,
    Release,
    Returned,
    Tick,
    Unresponsive,
    Want,
)
from pymux.hostbudget import HOST_CHUNK, HostBudget
from pymux.jobs import Limits
from pymux.lease import Cause, Lease, State
from pymux.members import Client, Group, Members
from pymux.pages import Pages
from pymux.policy import Policy
from pymux.table import Table

REVIEW_SECONDS = 0.1  # how often a contended device is looked at though nothing happened
MISSING_SECONDS = 5.0  # after which who waits for a member that has never come is told so
ATTEMPTS = 3  # grants of a group that are undone, before its request is denied


class Scheduler:
    """Leases and pages of one node's devices.

    Args:
        policy: the order of the queue.
        host_budget: bytes of host memory that clients may pin.
        frozen_until: before this time nothing is granted or given, so that the clients of a
            broker that died can say what they hold.
        limits: of jobs, by name.
        default_limits: of jobs that are not named.
        unresponsive_after: seconds of silence after which a client's lease goes to others.
    """

    def __init__(
        self,
        policy: Policy,
        *,
        host_budget: int,
        frozen_until: float = 0.0,
        limits: Mapping[str, Limits] | None = None,
        default_limits: Limits | None = None,
        unresponsive_after: float = 10.0,
    ) -> None:
        self.frozen_until = frozen_until
        self.unresponsive_after = unresponsive_after
        self.banks: dict[str, Bank] = {}
        self.durations = Durations()
        self.host = HostBudget(host_budget)
        self.members = Members(self.banks, limits or {}, default_limits or Limits(), host_budget)
        self.pages = Pages(self.banks, self.members)
        self.table = Table()
        self.dispatcher = Dispatcher(policy, self.table, self.members, self.pages, self.durations)
        self.generation = 0
        self._orders: dict[str, list[Lease]] = {}  # by device: what waits, as last decided
        self._heirs: dict[str, Lease] = {}  # who is next on a device that is not free
        self._arrivals = 0
        self._counted: set[str] = set()  # devices whose pages to plan
        self._host_touched = False
        self._reviewed = 0.0
        self._deadlocks = Deadlocks()
        self._queued: dict[tuple[int, int], tuple[Queued, int]] = {}  # by client and seq; with their order of arrival

    def add_device(self, device: str, page_size: int, budget: int, capacity: int) -> None:
        """Make a device known.

        Args:
            device: its UUID.
            page_size: bytes.
            budget: pages for clients now.
            capacity: pages for clients when nobody else uses the device.
        """
        self.banks[device] = Bank(page_size, budget, capacity)
        self.pages.costs[device] = SwitchCost()
        self.table.add_device(device)
        self._orders[device] = []

    def next_deadline(self, now: float) -> float | None:
        """When a Tick is due, or None."""
        if now < self.frozen_until:
            return self.frozen_until
        due = [now + RETRY_SECONDS] if self.pages.short_devices else []
        if (trimmed := self.host.deadline()) is not None:
            due.append(max(now, trimmed))
        if self._heirs or self.table.lent:
            due.append(max(now, self._reviewed + REVIEW_SECONDS))
        elif self._queued or any(self.table.waiting.values()) or any(b.taking for b in self.banks.values()):
            due.append(now + REVIEW_SECONDS)
        return min(due) if due else None

    def handle(self, event: Event | Budget | Tick, now: float) -> list[Action]:
        """Take one event.

        Args:
            event: what happened.
            now: seconds.

        Raises:
            CapacityError: what the client says that it needs does not fit what its job may have.
            ClientExists: a client of this name is connected.
            DriverError: the client's page size is not the device's.
            HostOutOfMemory: the same of host memory.
            ProtocolError: the client may not send this now.
        """
        out: list[Action] = []
        if isinstance(event, Budget):
            if event.device in self.banks:
                self.banks[event.device].budget = event.pages
                self.table.touched.add(event.device)
        elif isinstance(event, Tick):
            self._tick(now, out)
        elif isinstance(event, Joined):
            self._join(event, now, out)
        elif (client := self.members.clients.get(event.client)) is None:
            return []  # a late message of one that is gone
        else:
            self._heard(client, now)
            self._client_event(client, event, now, out)
        return self._advance(out, now)

    def _client_event(self, client: Client, event: Event, now: float, out: list[Action]) -> None:
        if not client.device and isinstance(event, Returned | Want | HostWant):
            raise ProtocolError(f"client '{client.name}' has no device, and spoke of its memory")
        match event:
            case Acquire():
                self._acquire(client, event, now, out)
            case Release():
                self._release(client, event, now, out)
            case Ready():
                self._ready(client, event, now, out)
            case Returned():
                account = self.pages.account(client)
                self.banks[client.device].returned(client.id, event.count, event.missing, now)
                account.counts = event.counts
                account.want = event.want
                self._counted.add(client.device)
            case Want():
                self._want(client, event, out)
            case Ran(phase=phase, count=count, seconds=seconds):
                self.durations.learn(client.job.name, phase, count, seconds)
            case Cancel(seq=seq):
                self._cancel(client, seq, now, out)
            case Failed():
                self._failed(client, event, now, out)
            case HostWant(want=want, urgent=urgent):
                self.host.ask(client.id, want, urgent=urgent)
                self._host_touched = True
            case Left():
                self._leave(client, now, out)
            case Kept(generation=generation, opener=opener):
                lease = self.table.leases.get(client.group.key)
                if lease and lease.generation == generation and lease.running:
                    lease.kept.pop(client.id, None)
                    if opener:
                        lease.kept[client.id] = opener
            case Queued(seq=seq):
                _, order = self._queued.pop((client.id, seq), (event, 0))
                if event.behind:
                    self._arrivals += not order
                    self._queued[client.id, seq] = event, order or self._arrivals
            case Pong():
                pass
            case _:
                raise ProtocolError(f"unknown event {event!r}")

    def describe(self, now: float) -> dict[str, Any]:
        """Everything a person wants to see, as plain data."""
        return {
            "policy": self.dispatcher.policy.name,
            "host": {"budget_bytes": self.host.budget, "free_bytes": self.host.free},
            "devices": [
                {
                    "uuid": device,
                    "page_size": bank.page_size,
                    "budget_pages": bank.budget,
                    "free_pages": bank.free,
                    "leases": [
                        {
                            "job": x.group[0],
                            "group": x.group[1],
                            "phase": x.phase,
                            "generation": x.generation,
                            "state": x.state.value,
                            "seconds": now - x.granted,
                        }
                        for x in self.table.leases.values()
                        if device in x.devices
                    ],
                }
                for device, bank in self.banks.items()
            ],
            "queue": [
                {
                    "job": x.group[0],
                    "group": x.group[1],
                    "phase": x.phase,
                    "seconds": now - x.arrived,
                    "missing": self.members.groups[x.group].missing,
                }
                for x in self.dispatcher.order(self.table.queue, now)
            ],
            "jobs": self.members.describe(now),
            "clients": [
                {
                    "job": c.job.name,
                    "name": c.name,
                    "device": c.device,
                    "responsive": c.responsive,
                    "pages_held": a.held,
                    "pages_wanted": a.want,
                    "discardable": a.counts.discardable,
                    "clean": a.counts.clean,
                    "dirty": a.counts.dirty,
                    "host_bytes": self.host.accounts[c.id].granted if c.device else 0,
                }
                for c in self.members.clients.values()
                for a in [self.pages.account(c) if c.device else Account()]
            ],
        }

    # ---- who is here ---------------------------------------------------------------------------

    def _heard(self, client: Client, now: float) -> None:
        client.heard, client.pinged = now, 0.0
        if client.responsive:
            return
        client.responsive = True
        if client.device:
            self.pages.is_back(client, now)
            self.table.touched.add(client.device)
        lease = self.table.leases.get(client.group.key)
        if lease and lease.state is State.FENCED and client.group.responsive:
            self._move(lease, Cause.WITHDRAW, now)

    def _join(self, e: Joined, now: float, out: list[Action]) -> None:
        client = self.members.join(e, now)
        group = client.group
        if e.device:
            self.banks[e.device].open(e.client, e.held, e.counts)
            first = HOST_CHUNK * e.page_size
            self.host.open(e.client, e.host_pinned, self.members.host_key(client), first)
            self._host_touched = True
            self.table.touched.add(e.device)
        for request in self.table.requests_of(group.key):
            self.table.enqueue(request, group)
        if not e.lease_generation:
            return
        lease = self.table.leases.get(group.key)
        others = e.device and any(x is not lease for x in self.table.on[e.device])
        if others or (lease and lease.generation != e.lease_generation):
            out.append(Fenced(client=e.client, generation=e.lease_generation))  # it was away for too long
            return
        if lease is None:
            self.generation = max(self.generation, e.lease_generation)
            lease = self._new_lease(client, e.phase, now)
            lease.state, lease.generation, lease.granted, lease.began = State.ACTIVE, e.lease_generation, now, now
            self.table.leases[group.key] = lease
            client.job.holding += 1
        if e.opener:
            lease.openers[e.client] = 0
        lease.members |= {e.client}
        lease.ready.add(e.client)
        if e.device and e.device not in lease.devices:
            lease.devices |= {e.device}
            self.table.on[e.device].append(lease)

    def _leave(self, client: Client, now: float, out: list[Action]) -> None:
        group = client.group
        if client.device:
            self.banks[client.device].close(client.id)
            self.host.close(client.id)
            self._host_touched = True
            self.table.touched.add(client.device)
        self.pages.settled(client)
        for key in [k for k in self._queued if k[0] == client.id]:
            del self._queued[key]
        self.members.leave(client)
        if client.job.name not in self.members.jobs:
            self.durations.forget(client.job.name)
        lease = self.table.leases.get(group.key)
        if lease and client.id in lease.members:
            lease.openers.pop(client.id, None)
            lease.members -= {client.id}
            lease.ready.discard(client.id)
            lease.released.discard(client.id)
            self.table.vacate(lease)
            lease.devices = frozenset(self.members.clients[m].device for m in lease.members) - {""}
            if lease.occupies:
                self.table.occupy(lease)
            self._member_left(lease, now, out)
        for request in self.table.requests_of(group.key):
            request.openers.pop(client.id, None)
            if not request.openers:
                self._withdraw(request, now, out)
            elif group.lost:
                self._deny_openers(request, "MemberLost", group.lost, now, out)
            else:
                self.table.enqueue(request, group)

    def _member_left(self, lease: Lease, now: float, out: list[Action]) -> None:
        if not lease.members or (not lease.openers and lease.state in (State.LENT, State.FENCED)):
            self._move(lease, Cause.WITHDRAW, now)
        elif lease.state is State.GRANTED and lease.openers:
            lease.failure = self.members.groups[lease.group].lost
            self._undo(lease, now, out)
        elif lease.current and not lease.openers:
            self._end(lease, Cause.RELEASE, now, out)
        else:
            self._settle_drain(lease, now, out)

    # ---- requests ------------------------------------------------------------------------------

    def _acquire(self, client: Client, e: Acquire, now: float, out: list[Action]) -> None:
        group = client.group
        held = self.table.leases.get(group.key)
        if held and held.state is State.LENT:
            if e.phase == held.phase and client.id in held.openers:
                held.openers, held.askers = {client.id: e.seq}, {client.id: e.opener} if e.opener else {}
                self.pages.note_want(client, e, now)
                held.ran = e.ran
                self._move(held, Cause.RESUME, now)
                self.table.enqueue(held, group)
                return
            self._move(held, Cause.LAPSE, now)
            held = None
        if held and held.state is State.GRANTED and client.id in held.openers:
            self._cancel(client, held.openers[client.id], now, out)  # it does not know of that grant yet
            held = self.table.leases.get(group.key)
        if held and client.id in held.openers and held.current:
            raise ProtocolError(f"client '{client.name}' asked for a lease that its group has already")
        for other in self.table.requests_of(group.key):
            if other.phase != e.phase and client.id in other.openers:  # it waits for one thing at a time
                del other.openers[client.id]
                if not other.openers:
                    self._withdraw(other, now, out)
        if text := group.lost or group.refused:
            error = "MemberLost" if group.lost else "ConfigError"
            group.refused = ""
            out.append(Deny(client=client.id, seq=e.seq, need=0, budget=0, error=error, text=text))
            return
        if client.device:
            self.pages.note_want(client, e, now)
            if denial := self.pages.impossible(client, e):
                out.append(denial)
                return
        if held and held.phase == e.phase and held.current:
            held.openers[client.id] = e.seq
            held.members |= {client.id}
            held.ready.discard(client.id)
            held.released.discard(client.id)
            out.append(Grant(client=client.id, seq=e.seq, generation=held.generation, phase=held.phase))
            return
        request = next((x for x in self.table.requests_of(group.key) if x.phase == e.phase), None)
        if request is None:
            request = self._new_lease(client, e.phase, now)
            request.ranks, request.regions = e.ranks, e.regions
            request.priority, request.overlap = e.priority, e.overlap
            request.expected, request.ran = e.expected, e.ran
            client.job.waiting += 1
        request.openers[client.id] = e.seq
        if e.opener:
            request.askers[client.id] = e.opener
        self.table.enqueue(request, group)
        if group.joint:
            self._prepare(request, out)

    def _new_lease(self, client: Client, phase: str, now: float) -> Lease:
        """A lease that has just arrived; who makes it counts it in its job."""
        self._arrivals += 1
        client.job.advance(now)
        return Lease(order=self._arrivals, group=client.group.key, phase=phase, arrived=now)

    def _prepare(self, request: Lease, out: list[Action]) -> None:
        """Tell the other members, so that their regions come in meanwhile."""
        for m in sorted(request.members - request.openers.keys() - request.prepared):
            request.prepared.add(m)
            out.append(Prepare(client=m, phase=request.phase, regions=request.regions))

    def _withdraw(self, request: Lease, now: float, out: list[Action]) -> None:
        self.table.dequeue(request)
        for m in request.members & self.members.clients.keys():
            client = self.members.clients[m]
            if m not in self._holding(client.group):
                self.pages.forget_want(client)
        out += [Drain(client=m, generation=0) for m in sorted(request.prepared & self.members.clients.keys())]
        self._move(request, Cause.WITHDRAW, now)

    def _holding(self, group: Group) -> frozenset[int]:
        lease = self.table.leases.get(group.key)
        return lease.members if lease and lease.occupies else frozenset()

    def _deny_openers(self, request: Lease, error: str, text: str, now: float, out: list[Action]) -> None:
        out += [Deny(client=c, seq=seq, need=0, budget=0, error=error, text=text) for c, seq in request.openers.items()]
        self._withdraw(request, now, out)

    def _cancel(self, client: Client, seq: int, now: float, out: list[Action]) -> None:
        for request in self.table.requests_of(client.group.key):
            if request.openers.get(client.id) == seq:
                del request.openers[client.id]
                if not request.openers:
                    self._withdraw(request, now, out)
                elif client.id in request.members and client.device:
                    self._prepare(request, out)
                return
        lease = self.table.leases.get(client.group.key)
        if lease and lease.openers.get(client.id) == seq and lease.state is State.UNDOING:
            del lease.openers[client.id]
        elif lease and lease.openers.get(client.id) == seq and lease.current:
            if len(lease.openers) > 1:
                self._step_back(lease, client, out)
                return
            if not client.group.joint:
                lease.released.add(client.id)  # it gave up before it saw the grant
            self._end(lease, Cause.RELEASE, now, out)

    def _want(self, client: Client, e: Want, out: list[Action]) -> None:
        held = self.table.leases.get(client.group.key)
        if not (held and held.occupies and client.id in held.members) and not any(
            client.id in x.prepared for x in self.table.waiting.get(client.device, ())
        ):
            return  # the lease was lost meanwhile; the client asks again
        self.pages.note_want(client, e, None)
        if denial := self.pages.impossible(client, e):
            out.append(denial)
        self._counted.add(client.device)

    # ---- a lease's life ------------------------------------------------------------------------

    def _move(self, lease: Lease, cause: Cause, now: float) -> State:
        """Change a lease's state, and what is counted by state."""
        job = self.members.jobs.get(lease.group[0])
        before = lease.state
        after = lease.move(cause)
        if before is State.LENT:
            self.table.lent.remove(lease)
        elif after is State.LENT:
            self.table.lent.append(lease)
        if job:
            job.advance(now)
            waits = (State.WAITING, State.GRANTED)
            job.waiting += (after in waits) - (before in waits)
            holds = (State.ACTIVE, State.RECALLED, State.PRESSED, State.DRAINING, State.LENDING, State.UNDOING)
            job.holding += (after in holds) - (before in holds)
        if after is State.GRANTED:
            self.table.leases[lease.group] = lease
            self.table.occupy(lease)
        elif after in (State.LENT, State.FENCED):
            self.table.vacate(lease)
        elif after in (State.ENDED, State.WAITING):
            self.table.vacate(lease)
            if self.table.leases.get(lease.group) is lease:
                del self.table.leases[lease.group]
        if after not in (State.GRANTED, State.ACTIVE, State.RECALLED, State.PRESSED):
            self.table.touched |= lease.devices
        return after

    def _grant(self, lease: Lease, now: float, out: list[Action], generation: int = 0) -> None:
        self.table.dequeue(lease)
        lease.generation = generation or self._new_generation()
        lease.granted, lease.ready, lease.known, lease.released, lease.failure = now, set(), 0, set(), ""
        lease.recalled_for, lease.promised, lease.promise, lease.kept = 0, None, None, {}
        lease.lacking = {d: self.pages.lacking(lease, d) for d in lease.devices}
        self._move(lease, Cause.GRANT, now)
        told = self.members.groups[lease.group].joint
        phase, regions = (lease.phase, lease.regions) if told else ("", "")
        out += [
            Grant(client=m, seq=lease.openers.get(m, 0), generation=lease.generation, phase=phase, regions=regions)
            for m in sorted(lease.members)
        ]

    def _ready(self, client: Client, e: Ready, now: float, out: list[Action]) -> None:
        lease = self.table.leases.get(client.group.key)
        if lease is None or lease.generation != e.generation or client.id not in lease.members or not lease.occupies:
            return
        lease.ready.add(client.id)
        lease.known |= e.known
        if client.device:
            self.pages.account(client).want = e.want
            self.banks[client.device].runs(client.id, e.counts)
            self._counted.add(client.device)
        if lease.running and client.group.joint and client.id in lease.openers:
            out.append(Active(client=client.id, generation=lease.generation))
        if lease.state is not State.GRANTED or not lease.ready >= lease.members:
            return
        if client.group.joint:
            unknown = [n for i, n in enumerate(region_names(lease.regions)) if not lease.known >> i & 1]
            if unknown:
                lease.failure = f"no member of group '{lease.group[1]}' has a region {unknown[0]!r}."
                lease.attempts = ATTEMPTS
                self._undo(lease, now, out, error="UnknownRegion")
                return
            out += [Active(client=m, generation=lease.generation) for m in sorted(lease.openers)]
        lease.began = now
        for device, pages in lease.lacking.items():
            self.pages.costs[device].learn(pages, now - lease.granted)
        self._move(lease, Cause.ACKNOWLEDGED, now)
        for device in lease.devices & self._heirs.keys():
            self._recall(device, now, out)
            self._promise(device, out)

    def _release(self, client: Client, e: Release, now: float, out: list[Action]) -> None:
        if client.device:
            self.pages.account(client).counts = e.counts
            self._counted.add(client.device)
        lease = self.table.leases.get(client.group.key)
        if lease is None or lease.generation != e.generation or not lease.occupies or client.id not in lease.members:
            return
        if lease.current:
            if client.id not in lease.openers:
                return  # of a request that it had taken back
            if len(lease.openers) > 1:
                self._step_back(lease, client, out)
                return
            lease.released.add(client.id)
            lease.until = now + e.back
            heir, promise = lease.promised, lease.promise
            if e.back == 0:
                lease.promised = lease.promise = None  # kept below
            self._end(lease, Cause.LEND if e.back > 0 else Cause.RELEASE, now, out)
            if heir and promise and e.back == 0:
                assert heir.state is State.WAITING
                self._grant(heir, now, out, promise.generation)
        else:
            lease.released.add(client.id)
            self._settle_drain(lease, now, out)

    def _step_back(self, lease: Lease, client: Client, out: list[Action]) -> None:
        """One of several openers is done; the phase goes on for the others, and it is a member of it still."""
        del lease.openers[client.id]
        if lease.state is State.GRANTED:
            lease.ready.discard(client.id)
            grant = Grant(
                client=client.id, seq=0, generation=lease.generation, phase=lease.phase, regions=lease.regions
            )
            out.append(grant)

    def _unpromise(self, lease: Lease, out: list[Action]) -> None:
        if lease.promise:
            out += [Promise(client=m, generation=lease.generation, grant=None) for m in lease.members]
        lease.promised = lease.promise = None

    def _end(self, lease: Lease, cause: Cause, now: float, out: list[Action]) -> None:
        self._unpromise(lease, out)
        self._move(lease, cause, now)
        out += [Drain(client=m, generation=lease.generation) for m in sorted(lease.members - lease.released)]
        self._settle_drain(lease, now, out)

    def _failed(self, client: Client, e: Failed, now: float, out: list[Action]) -> None:
        lease = self.table.leases.get(client.group.key)
        if lease is None or lease.generation != e.generation or client.id not in lease.members:
            return
        if lease.running and client.id in lease.openers:  # it joined others in their phase, and cannot
            seq = lease.openers[client.id]
            out.append(Deny(client=client.id, seq=seq, need=0, budget=0, error="DeviceOutOfMemory", text=e.text))
            if len(lease.openers) > 1:
                self._step_back(lease, client, out)
            else:
                self._end(lease, Cause.RELEASE, now, out)
        if lease.state is not State.GRANTED:
            return
        lease.failure = e.text
        lease.released.add(client.id)
        if e.for_good:
            lease.attempts = ATTEMPTS
        self._undo(lease, now, out)

    def _undo(self, lease: Lease, now: float, out: list[Action], error: str = "DeviceOutOfMemory") -> None:
        """A member cannot: nobody keeps what it took for this grant."""
        lease.attempts += 1
        self._move(lease, Cause.FAIL, now)
        lease.error = error
        out += [Drain(client=m, generation=lease.generation) for m in sorted(lease.members - lease.released)]
        self._settle_drain(lease, now, out)

    def _settle_drain(self, lease: Lease, now: float, out: list[Action]) -> None:
        """Go on when all members have drained their devices."""
        if lease.state not in (State.DRAINING, State.LENDING, State.UNDOING) or not lease.released >= lease.members:
            return
        group = self.members.groups.get(lease.group)
        for m in lease.members:
            client = self.members.clients[m]
            if client.device:
                bank, account = self.banks[client.device], self.pages.account(client)
                bank.ended(m, now)
                account.unwilling_until = 0.0
                if lease.state is not State.UNDOING or m not in lease.openers:
                    account.want = 0
            self.pages.settled(client)
        if group and group.joint and lease.state is not State.UNDOING:
            out += [Ended(client=m, generation=lease.generation) for m in sorted(lease.members)]
        again = self._move(lease, Cause.DRAINED, now) is State.WAITING
        if not again or group is None:
            return
        if lease.attempts >= ATTEMPTS and not group.lost:
            self._deny_openers(lease, lease.error, lease.failure, now, out)
        else:
            lease.until = now + RETRY_SECONDS
            self._requeue(lease, group, now, out)

    def _requeue(self, lease: Lease, group: Group, now: float, out: list[Action]) -> None:
        """The request waits as before it was granted."""
        lease.prepared = set()
        if not lease.openers:
            self._withdraw(lease, now, out)
            return
        if group.lost:
            self._deny_openers(lease, "MemberLost", group.lost, now, out)
            return
        self.table.enqueue(lease, group)
        if group.joint:
            self._prepare(lease, out)

    # ---- time ----------------------------------------------------------------------------------

    def _tick(self, now: float, out: list[Action]) -> None:
        self._reviewed = now
        trimmed = self.host.deadline()
        self._host_touched |= trimmed is not None and now >= trimmed
        self.table.touched |= {d for d, w in self.table.waiting.items() if w}
        self.table.touched |= self.pages.short_devices
        if 0 < self.frozen_until <= now:
            self.frozen_until = 0.0
            self.table.touched |= self.banks.keys()
            for lease in [x for x in self.table.leases.values() if x.running and not x.openers]:
                self._end(lease, Cause.RELEASE, now, out)  # who opened it is gone
        for lease in [x for x in self.table.lent if x.until <= now]:
            self._move(lease, Cause.LAPSE, now)
        if now >= self.frozen_until:
            self._watch(now, out)
            self._break_deadlock(now, out)
            self._name_missing(now, out)

    def _name_missing(self, now: float, out: list[Action]) -> None:
        """Tell those who wait for members that have not come who these are."""
        for request in self.table.queue:
            group = self.members.groups[request.group]
            if group.refused:
                text, group.refused = group.refused, ""
                for other in self.table.requests_of(group.key):
                    self._deny_openers(other, "ConfigError", text, now, out)
                continue
            missing = group.missing
            if missing and not request.noticed and now - request.arrived >= MISSING_SECONDS:
                request.noticed = True
                text = f"phase '{request.phase}' waits for its group. {missing}"
                out += [Notice(client=c, text=text) for c in sorted(request.openers)]

    def _break_deadlock(self, now: float, out: list[Action]) -> None:
        """Fail the youngest of the waits that would never end."""
        requests = self.table.queue
        if not requests and not self._queued:
            return
        waits = [w for x in requests for w in self._waits_of(x)]
        for event, order in self._queued.values():
            client = self.members.clients[event.client]
            behind = {(client.process, event.behind): self._label(client.id)}
            waits.append(
                Wait(who=(client.process, event.opener), behind=behind, order=order, what=(client, event)),
            )
        cycle = self._deadlocks.look(waits, now)
        if not cycle:
            return
        what = cycle[0].what
        if isinstance(what, Lease):
            self._deny_openers(what, "DeadlockError", explain(cycle, what.phase), now, out)
            return
        client, event = what
        del self._queued[client.id, event.seq]
        text = explain(cycle, f"of {client.name}")
        out.append(Deny(client=client.id, seq=event.seq, need=0, budget=0, error="DeadlockError", text=text))

    def _waits_of(self, request: Lease) -> list[Wait]:
        """Who waits in a request, and for whom: those in its way, and those that its devices are kept for."""
        clients = self.members.clients
        behind: dict[Opener, str] = {}
        ahead = [x for d in request.devices for x in self.table.on[d] if not self.dispatcher.together(x, request)]
        own = self.table.leases.get(request.group)
        for lease in [*ahead, own] if own else ahead:
            behind |= {(clients[c].process, n): self._label(c) for c, n in lease.kept.items() if c in clients}
        for heir in {self._heirs[d].order: self._heirs[d] for d in request.devices & self._heirs.keys()}.values():
            if heir is not request and heir.state is State.WAITING:
                asks = ((c, n) for c, n in heir.askers.items() if c in heir.openers)
                behind |= {(clients[c].process, n): self._label(c) for c, n in asks}
        return [
            Wait(who=(clients[c].process, request.askers[c]), behind=behind, order=request.order, what=request)
            for c in request.openers
            if c in request.askers
        ]

    def _label(self, client: int) -> str:
        c = self.members.clients[client]
        return label(c.job.name, c.name, c.process)

    def _watch(self, now: float, out: list[Action]) -> None:
        """Ask those whom somebody waits for whether they run; pass over those who do not."""
        owing = {m for d in self._heirs for x in self.table.on[d] for m in x.members}
        owing |= {m for x in self.table.leases.values() if x.state not in (State.LENT, State.FENCED) and not x.running
                  for m in x.members}  # fmt: skip
        owing |= {c for bank in self.banks.values() if bank.taking for c, a in bank.accounts.items() if a.taking}
        for c in sorted(owing):
            client = self.members.clients[c]
            silent = now - client.heard
            if not client.responsive or silent < self.unresponsive_after / 2:
                continue
            if client.pinged == 0.0:
                client.pinged = now
                out.append(Ping(client=c))
            elif now - client.pinged >= self.unresponsive_after / 2:
                self._pass_over(client, now, out)

    def _pass_over(self, client: Client, now: float, out: list[Action]) -> None:
        client.responsive = False
        out.append(Unresponsive(client=client.id, seconds=now - client.heard))
        if client.device:
            account = self.pages.account(client)
            self.banks[client.device].returned(client.id, 0, account.taking, now)
            account.unwilling_until = inf
            self.table.touched.add(client.device)
        lease = self.table.leases.get(client.group.key)
        if lease and lease.occupies and client.id in lease.members:
            self._unpromise(lease, out)
            requeued = lease.state in (State.GRANTED, State.UNDOING)
            fenced = [Fenced(client=m, generation=lease.generation, requeued=requeued) for m in sorted(lease.members)]
            out += fenced
            for m in lease.members:
                self.pages.settled(self.members.clients[m])
                if not requeued or m not in lease.openers:
                    self.pages.forget_want(self.members.clients[m])
            self._move(lease, Cause.FENCE, now)
            if requeued:
                self._requeue(lease, client.group, now, out)

    # ---- decisions -----------------------------------------------------------------------------

    def _advance(self, out: list[Action], now: float) -> list[Action]:
        if now < self.frozen_until:
            return out
        if self.table.touched:
            scope = self.table.scope(self.table.touched)
            self.table.touched = set()
            decision = self.dispatcher.decide(scope, now, lambda lease: self._grant(lease, now, out))
            for device in scope:
                at = decision.order if len(scope) == 1 else [x for x in decision.order if device in x.devices]
                self._orders[device] = at
                self._heirs.pop(device, None)
                if device in decision.heirs:
                    self._heirs[device] = decision.heirs[device]
                    self._recall(device, now, out)
                self._promise(device, out)
            self._counted |= scope
        for device in sorted(self._counted):
            heir = self._heirs.get(device)
            heir = heir if heir and heir.state is State.WAITING else None
            out += self.pages.plan(device, self.table.on[device], heir, self._orders[device], now)
        self._counted.clear()
        if self._host_touched:
            self._host_touched = False
            shared = (b.accounts for b in self.banks.values() if len(b.accounts) > 1)
            out += self.host.plan({c for accounts in shared for c in accounts}, now)
        return out

    def _new_generation(self) -> int:
        self.generation += 1
        return self.generation

    def _promise(self, device: str, out: list[Action]) -> None:
        """Settle what follows a lease of one process on one device, so that no decision stands in its way."""
        for lease in self.table.on[device]:
            heir = self._heirs.get(device)
            if heir and not (
                lease.running
                and len(self.table.on[device]) == len(lease.members) == len(heir.members) == 1
                and lease.devices == heir.devices
                and not any(self.members.groups[x.group].joint for x in (lease, heir))
                and self.pages.none_stopped(device)
                and not any(device in x.devices for x in self.table.lent)
            ):
                heir = None
            (seq,) = heir.openers.values() if heir else (0,)
            if lease.promised is heir and (lease.promise is None or lease.promise.seq == seq):
                continue
            lease.promised, lease.promise = heir, None
            if heir:
                (member,) = heir.members
                lease.promise = Grant(client=member, seq=seq, generation=self._new_generation())
            out += [Promise(client=m, generation=lease.generation, grant=lease.promise) for m in lease.members]

    def _recall(self, device: str, now: float, out: list[Action]) -> None:
        """Ask those who are in the way of who is next."""
        heir = self._heirs[device]
        for lease in self.table.on[device]:
            if lease.state not in (State.ACTIVE, State.RECALLED) or self.dispatcher.together(lease, heir):
                continue
            press, extend = self.dispatcher.presses(lease, heir, now)
            if not press and lease.state is State.RECALLED and lease.recalled_for == heir.order:
                continue
            if press or lease.state is State.ACTIVE:
                self._move(lease, Cause.PRESS if press else Cause.RECALL, now)
            lease.recalled_for = heir.order
            recalls = [
                Recall(client=m, generation=lease.generation, press=press, extend=extend) for m in sorted(lease.openers)
            ]
            out += recalls


def region_names(text: str) -> list[str]:
    """The distinct names of a request's regions, in the order of their bits in ``Ready.known``.

    The text has a line for each use: ``u``, ``l`` or ``w`` for used, lazy or written, and the name.
    """
    return list(dict.fromkeys(line[1:] for line in text.split("\n") if line[:1] in {"u", "l", "w"}))
