"""Who runs: leases, the queue, and which client gets pages. Sans-IO: events in, actions out.

Invariants: leases that occupy a device are alone there, but for phases that allow overlap and fit; a lease
over several devices is granted whole; generations only grow, so a late message never touches a newer
lease; a request that cannot be met is denied at once; what a client did wrong is raised to the caller
and changes nothing for the others.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from math import inf
from typing import Any

from pymux.bank import RETRY_SECONDS, Account, Bank, Claim
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
    Give,
    Grant,
    HostWant,
    Joined,
    Left,
    Ping,
    Pong,
    Prepare,
    Ran,
    Ready,
    Recall,
    Release,
    Returned,
    Tick,
    Unresponsive,
    Want,
)
from pymux.hostbudget import HostBudget
from pymux.jobs import Limits
from pymux.lease import Cause, GroupKey, Lease, State
from pymux.members import NO_BUDGET, Client, Group, Members
from pymux.policy import Candidate, Policy

PATIENCE_SECONDS = 5.0  # how long a holder may lack pages that nobody can give, before it is told
REVIEW_SECONDS = 0.1  # how often a contended device is looked at though nothing happened
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
        self.policy = policy
        self.frozen_until = frozen_until
        self.unresponsive_after = unresponsive_after
        self.banks: dict[str, Bank] = {}
        self.costs: dict[str, SwitchCost] = {}
        self.durations = Durations()
        self.host = HostBudget(host_budget)
        self.members = Members(self.banks, limits or {}, default_limits or Limits(), host_budget)
        self.leases: dict[GroupKey, Lease] = {}  # those that occupy devices, are lent or fenced
        self.generation = 0
        self.on: dict[str, list[Lease]] = {}  # by device: what occupies it
        self.waiting: dict[str, list[Lease]] = {}  # by device, in the order of arrival
        self.homeless: list[Lease] = []  # requests of groups that have no device yet
        self._orders: dict[str, list[Lease]] = {}  # of `waiting`, as last decided
        self._heirs: dict[str, Lease] = {}  # who is next on a device that is not free
        self._arrivals = 0
        self._short: dict[int, float] = {}  # holders that nobody can give pages, since when
        self._touched: set[str] = set()  # devices to decide about
        self._counted: set[str] = set()  # devices whose pages to plan
        self._host_touched = False
        self._reviewed = 0.0

    def add_device(self, device: str, page_size: int, budget: int, capacity: int) -> None:
        """Make a device known.

        Args:
            device: its UUID.
            page_size: bytes.
            budget: pages for clients now.
            capacity: pages for clients when nobody else uses the device.
        """
        self.banks[device] = Bank(page_size, budget, capacity)
        self.costs[device] = SwitchCost()
        self.on[device], self.waiting[device], self._orders[device] = [], [], []

    @property
    def queue(self) -> list[Lease]:
        """The requests that wait, in the order of arrival."""
        found = {x.order: x for leases in (*self.waiting.values(), self.homeless) for x in leases}
        return [found[k] for k in sorted(found)]

    def next_deadline(self, now: float) -> float | None:
        """When a Tick is due, or None."""
        if now < self.frozen_until:
            return self.frozen_until
        due = [now + RETRY_SECONDS] if self._short else []
        if self._heirs or any(x.state is State.LENT for x in self.leases.values()):
            due.append(max(now, self._reviewed + REVIEW_SECONDS))
        elif any(self.waiting.values()) or any(b.taking for b in self.banks.values()):
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
                self._touched.add(event.device)
        elif isinstance(event, Tick):
            self._tick(now, out)
        elif isinstance(event, Joined):
            self._join(event, now)
        elif (client := self.members.clients.get(event.client)) is None:
            return []  # a late message of one that is gone
        else:
            self._heard(client, now)
            self._client_event(client, event, now, out)
        return self._advance(out, now)

    def _client_event(self, client: Client, event: Event, now: float, out: list[Action]) -> None:
        match event:
            case Acquire():
                self._acquire(client, event, now, out)
            case Release():
                self._release(client, event, now, out)
            case Ready():
                self._ready(client, event, now, out)
            case Returned():
                account = self._account(client)
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
            case Pong():
                pass
            case _:
                raise ProtocolError(f"unknown event {event!r}")

    def describe(self, now: float) -> dict[str, Any]:
        """Everything a person wants to see, as plain data."""
        return {
            "policy": self.policy.name,
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
                        for x in self.leases.values()
                        if device in x.devices
                    ],
                }
                for device, bank in self.banks.items()
            ],
            "queue": [
                {"job": x.group[0], "group": x.group[1], "phase": x.phase, "seconds": now - x.arrived}
                for x in self._in_order(self.queue, now)
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
                for a in [self._account(c) if c.device else Account()]
            ],
        }

    # ---- who is here ---------------------------------------------------------------------------

    def _account(self, client: Client) -> Account:
        return self.banks[client.device].accounts[client.id]

    def _heard(self, client: Client, now: float) -> None:
        client.heard, client.pinged = now, 0.0
        if client.responsive:
            return
        client.responsive = True
        if client.device:
            self._account(client).unwilling_until = 0.0
            self._touched.add(client.device)
        lease = self.leases.get(client.group.key)
        if lease and lease.state is State.FENCED and client.group.responsive:
            self._move(lease, Cause.WITHDRAW, now)

    def _join(self, e: Joined, now: float) -> None:
        client = self.members.join(e, now)
        group = client.group
        if e.device:
            self.banks[e.device].open(e.client, e.held, e.counts)
            self.host.open(e.client, e.host_pinned, self.members.host_key(client))
            self._host_touched = True
            self._touched.add(e.device)
        for request in [x for x in self.queue if x.group == group.key]:
            self._place(request, group)
        if not e.lease_generation:
            return
        lease = self.leases.get(group.key)
        if lease is None:
            if e.device and self.on[e.device]:
                return  # somebody has the device already: this one was away for too long
            self.generation = max(self.generation, e.lease_generation)
            self._arrivals += 1
            lease = Lease(
                order=self._arrivals,
                group=group.key,
                phase=e.phase,
                arrived=now,
                state=State.ACTIVE,
                generation=e.lease_generation,
                granted=now,
                began=now,
            )
            self.leases[group.key] = lease
            client.job.advance(now)
            client.job.holding += 1
        elif lease.generation != e.lease_generation:
            return
        if e.opener:
            lease.openers[e.client] = 0
        lease.members |= {e.client}
        lease.ready.add(e.client)
        if e.device and e.device not in lease.devices:
            lease.devices |= {e.device}
            self.on[e.device].append(lease)

    def _leave(self, client: Client, now: float, out: list[Action]) -> None:
        group = client.group
        if client.device:
            self.banks[client.device].close(client.id)
            self.host.close(client.id)
            self._host_touched = True
            self._touched.add(client.device)
        self._short.pop(client.id, None)
        self.members.leave(client)
        lease = self.leases.get(group.key)
        if lease and client.id in lease.members:
            lease.openers.pop(client.id, None)
            lease.members -= {client.id}
            lease.ready.discard(client.id)
            lease.released.discard(client.id)
            self._take_off(lease)
            lease.devices = frozenset(self.members.clients[m].device for m in lease.members) - {""}
            if lease.occupies:
                self._put_on(lease)
            self._member_left(lease, now, out)
        for request in [x for x in self.queue if x.group == group.key]:
            request.openers.pop(client.id, None)
            if not request.openers:
                self._withdraw(request, now, out)
            elif group.lost:
                self._deny_openers(request, "MemberLost", group.lost, now, out)
            else:
                self._place(request, group)

    def _member_left(self, lease: Lease, now: float, out: list[Action]) -> None:
        if not lease.members or (not lease.openers and lease.state in {State.LENT, State.FENCED}):
            self._move(lease, Cause.WITHDRAW, now)
        elif lease.state is State.GRANTED and lease.openers:
            lease.failure = self.members.groups[lease.group].lost
            self._undo(lease, now, out)
        elif (lease.running or lease.state is State.GRANTED) and not lease.openers:
            self._end(lease, Cause.RELEASE, now, out)
        else:
            self._settle_drain(lease, now, out)

    # ---- requests ------------------------------------------------------------------------------

    def _acquire(self, client: Client, e: Acquire, now: float, out: list[Action]) -> None:
        group = client.group
        held = self.leases.get(group.key)
        if held and held.state is State.LENT:
            if e.phase == held.phase and client.id in held.openers:
                held.openers[client.id] = e.seq
                self._note_want(client, e, now)
                held.ran = e.ran
                self._move(held, Cause.RESUME, now)
                self._place(held, group)
                return
            self._move(held, Cause.LAPSE, now)
            held = None
        if held and client.id in held.openers.keys() - held.released and held.occupies:
            raise ProtocolError(f"client '{client.name}' asked for a lease that its group has already")
        requests = [x for x in self.queue if x.group == group.key]
        if any(client.id in x.openers for x in requests):
            raise ProtocolError(f"client '{client.name}' asked for a lease that its group waits for already")
        if group.lost:
            text = group.lost
            out.append(Deny(client=client.id, seq=e.seq, need=0, budget=0, error="MemberLost", text=text))
            return
        if client.device:
            self._note_want(client, e, now)
            if self._deny_impossible(client, e, out):
                return
        if held and held.phase == e.phase and (held.running or held.state is State.GRANTED):
            held.openers[client.id] = e.seq
            held.members |= {client.id}
            held.ready.discard(client.id)
            held.released.discard(client.id)
            out.append(Grant(client=client.id, seq=e.seq, generation=held.generation, phase=held.phase))
            return
        request = next((x for x in requests if x.phase == e.phase), None)
        if request is None:
            self._arrivals += 1
            request = Lease(
                order=self._arrivals,
                group=group.key,
                phase=e.phase,
                arrived=now,
                ranks=e.ranks,
                regions=e.regions,
                priority=e.priority,
                overlap=e.overlap,
                expected=e.expected,
                ran=e.ran,
            )
            client.job.advance(now)
            client.job.waiting += 1
        request.openers[client.id] = e.seq
        self._place(request, group)
        if group.joint:
            self._prepare(request, out)

    def _prepare(self, request: Lease, out: list[Action]) -> None:
        """Tell the other members, so that their regions come in meanwhile."""
        for m in sorted(request.members - request.openers.keys() - request.prepared):
            request.prepared.add(m)
            out.append(Prepare(client=m, phase=request.phase, regions=request.regions))

    def _place(self, lease: Lease, group: Group) -> None:
        """Put a request where its devices are looked at."""
        self._remove(lease)
        on = {c.id: c.device for c in group.members.values() if c.device and (not lease.ranks or c.rank in lease.ranks)}
        lease.members = frozenset(on) | frozenset(lease.openers)
        lease.devices = frozenset(on.values())
        for device in lease.devices:
            at = self.waiting[device]
            at.append(lease)
            if len(at) > 1 and at[-2].order > lease.order:
                at.sort(key=lambda x: x.order)
            self._touched.add(device)
        if not lease.devices:
            self.homeless.append(lease)

    def _remove(self, lease: Lease) -> None:
        for device in lease.devices:
            if lease in self.waiting[device]:
                self.waiting[device].remove(lease)
                self._touched.add(device)
        if lease in self.homeless:
            self.homeless.remove(lease)

    def _withdraw(self, request: Lease, now: float, out: list[Action]) -> None:
        self._remove(request)
        for m in request.members & self.members.clients.keys():
            client = self.members.clients[m]
            if client.device and m not in self._holding(client.group):
                self._account(client).want = 0
        out += [Drain(client=m, generation=0) for m in sorted(request.prepared & self.members.clients.keys())]
        self._move(request, Cause.WITHDRAW, now)

    def _holding(self, group: Group) -> frozenset[int]:
        lease = self.leases.get(group.key)
        return lease.members if lease and lease.occupies else frozenset()

    def _deny_openers(self, request: Lease, error: str, text: str, now: float, out: list[Action]) -> None:
        out += [Deny(client=c, seq=seq, need=0, budget=0, error=error, text=text) for c, seq in request.openers.items()]
        self._withdraw(request, now, out)

    def _cancel(self, client: Client, seq: int, now: float, out: list[Action]) -> None:
        for request in self.queue:
            if request.openers.get(client.id) == seq:
                del request.openers[client.id]
                if not request.openers:
                    self._withdraw(request, now, out)
                elif client.id in request.members and client.device:
                    self._prepare(request, out)
                return
        lease = self.leases.get(client.group.key)
        if lease and lease.openers.get(client.id) == seq and (lease.running or lease.state is State.GRANTED):
            if len(lease.openers) > 1:
                self._step_back(lease, client, out)
            else:
                self._end(lease, Cause.RELEASE, now, out)

    def _want(self, client: Client, e: Want, out: list[Action]) -> None:
        held = self.leases.get(client.group.key)
        if not (held and held.occupies and client.id in held.members) and not any(
            client.id in x.prepared for x in self.waiting.get(client.device, ())
        ):
            return  # the lease was lost meanwhile; the client asks again
        self._note_want(client, e, None)
        self._deny_impossible(client, e, out)
        self._counted.add(client.device)

    def _note_want(self, client: Client, e: Acquire | Want, now: float | None) -> None:
        if not client.device:
            return
        account = self._account(client)
        account.want, account.own, account.counts = e.want, e.own, e.counts
        client.want_seq = e.seq
        if now is not None:
            self.banks[client.device].asked(client.id, now)
            account.unwilling_until = 0.0

    def _deny_impossible(self, client: Client, e: Acquire | Want, out: list[Action]) -> bool:
        if e.want - e.own <= self._most(client):
            return False
        out.append(self._denial(client, for_good=True))
        return True

    def _most(self, client: Client) -> int:
        """Pages that a client can have at best."""
        limit = self.members.page_limit(client)
        capacity = self.banks[client.device].capacity
        return capacity if limit is None else min(capacity, limit)

    def _denial(self, client: Client, *, for_good: bool) -> Deny:
        bank, account = self.banks[client.device], self._account(client)
        need, mib, job = account.want - account.own, bank.page_size / 2**20, client.job.name
        most = self._most(client)
        if for_good and most < bank.capacity:
            error = "CapacityError"
            text = (
                f"job '{job}' needs {need * mib:.0f} MiB on the device at once, and may have {most * mib:.0f} MiB of "
                f"it. Use fewer regions in this phase (uses=...), or give the job more in the broker's configuration."
            )
        elif for_good:
            error = "CapacityError"
            text = (
                f"job '{job}' needs {need * mib:.0f} MiB on the device at once, and the device has "
                f"{bank.capacity * mib:.0f} MiB for regions. Use fewer regions in this phase (uses=...), a smaller "
                f"model or batch, or a larger device."
            )
        else:
            error = "DeviceOutOfMemory"
            text = (
                f"job '{job}' lacks {(account.want - account.held) * mib:.0f} of the {need * mib:.0f} MiB it needs. "
                f"The device has {bank.budget * mib:.0f} of {bank.capacity * mib:.0f} MiB for regions now, and no "
                f"other client can give pages: others outside pymux use the device, the host has no room "
                f"to swap out, or who has them is stopped. "
                f"'pymux status' shows who holds what."
            )
        account.want = 0
        return Deny(client=client.id, seq=client.want_seq, need=need, budget=most, error=error, text=text)

    # ---- a lease's life ------------------------------------------------------------------------

    def _move(self, lease: Lease, cause: Cause, now: float) -> State:
        """Change a lease's state, and what is counted by state."""
        job = self.members.jobs.get(lease.group[0])
        before = lease.state
        after = lease.move(cause)
        if job:
            job.advance(now)
            waits = (State.WAITING, State.GRANTED)
            job.waiting += (after in waits) - (before in waits)
            holds = (State.ACTIVE, State.RECALLED, State.PRESSED, State.DRAINING, State.LENDING, State.UNDOING)
            job.holding += (after in holds) - (before in holds)
        if after is State.GRANTED:
            self.leases[lease.group] = lease
            self._put_on(lease)
        elif after in {State.LENT, State.FENCED}:
            self._take_off(lease)
        elif after in {State.ENDED, State.WAITING}:
            self._take_off(lease)
            if self.leases.get(lease.group) is lease:
                del self.leases[lease.group]
        if after not in {State.GRANTED, State.ACTIVE, State.RECALLED, State.PRESSED}:
            self._touched |= lease.devices
        return after

    def _put_on(self, lease: Lease) -> None:
        for device in lease.devices:
            self.on[device].append(lease)

    def _take_off(self, lease: Lease) -> None:
        for device in lease.devices:
            if lease in self.on[device]:
                self.on[device].remove(lease)
                self._touched.add(device)

    def _grant(self, lease: Lease, now: float, out: list[Action]) -> None:
        self._remove(lease)
        self.generation += 1
        lease.generation = self.generation
        lease.granted, lease.ready, lease.known, lease.released, lease.failure = now, set(), 0, set(), ""
        lease.lacking = {d: self._lacking(lease, d) for d in lease.devices}
        self._move(lease, Cause.GRANT, now)
        told = self.members.groups[lease.group].joint
        phase, regions = (lease.phase, lease.regions) if told else ("", "")
        out += [
            Grant(client=m, seq=lease.openers.get(m, 0), generation=lease.generation, phase=phase, regions=regions)
            for m in sorted(lease.members)
        ]

    def _ready(self, client: Client, e: Ready, now: float, out: list[Action]) -> None:
        lease = self.leases.get(client.group.key)
        if lease is None or lease.generation != e.generation or client.id not in lease.members or not lease.occupies:
            return
        lease.ready.add(client.id)
        lease.known |= e.known
        if client.device:
            self._account(client).want = e.want
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
            self.costs[device].learn(pages, now - lease.granted)
        self._move(lease, Cause.ACKNOWLEDGED, now)
        for device in lease.devices & self._heirs.keys():
            self._recall(device, self._heirs[device], now, out)

    def _release(self, client: Client, e: Release, now: float, out: list[Action]) -> None:
        if client.device:
            self._account(client).counts = e.counts
            self._counted.add(client.device)
        lease = self.leases.get(client.group.key)
        if lease is None or lease.generation != e.generation or not lease.occupies or client.id not in lease.members:
            return
        if lease.running or lease.state is State.GRANTED:
            if client.id not in lease.openers:
                return  # of a request that it had taken back
            if len(lease.openers) > 1:
                self._step_back(lease, client, out)
                return
            lease.released.add(client.id)
            lease.until = now + e.back
            self._end(lease, Cause.LEND if e.back > 0 else Cause.RELEASE, now, out)
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

    def _end(self, lease: Lease, cause: Cause, now: float, out: list[Action]) -> None:
        self._move(lease, cause, now)
        out += [Drain(client=m, generation=lease.generation) for m in sorted(lease.members - lease.released)]
        self._settle_drain(lease, now, out)

    def _failed(self, client: Client, e: Failed, now: float, out: list[Action]) -> None:
        lease = self.leases.get(client.group.key)
        if lease is None or lease.generation != e.generation or lease.state is not State.GRANTED:
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
        if lease.state not in {State.DRAINING, State.LENDING, State.UNDOING} or not lease.released >= lease.members:
            return
        group = self.members.groups.get(lease.group)
        for m in lease.members:
            client = self.members.clients[m]
            if client.device:
                bank, account = self.banks[client.device], self._account(client)
                bank.ended(m, now)
                account.unwilling_until = 0.0
                if lease.state is not State.UNDOING or m not in lease.openers:
                    account.want = 0
            self._short.pop(m, None)
        if group and group.joint and lease.state is not State.UNDOING:
            out += [Ended(client=m, generation=lease.generation) for m in sorted(lease.members)]
        again = self._move(lease, Cause.DRAINED, now) is State.WAITING
        lease.prepared = set()
        if not again or group is None:
            return
        if not lease.openers:
            self._withdraw(lease, now, out)
        elif group.lost:
            self._deny_openers(lease, "MemberLost", group.lost, now, out)
        elif lease.attempts >= ATTEMPTS:
            self._deny_openers(lease, lease.error, lease.failure, now, out)
        else:
            lease.until = now + RETRY_SECONDS
            self._place(lease, group)
            self._prepare(lease, out)

    # ---- time ----------------------------------------------------------------------------------

    def _tick(self, now: float, out: list[Action]) -> None:
        self._reviewed = now
        self._touched |= {d for d, w in self.waiting.items() if w}
        self._touched |= {self.members.clients[c].device for c in self._short}
        if 0 < self.frozen_until <= now:
            self.frozen_until = 0.0
            self._touched |= self.banks.keys()
            for lease in [x for x in self.leases.values() if x.running and not x.openers]:
                self._end(lease, Cause.RELEASE, now, out)  # who opened it is gone
        for lease in [x for x in self.leases.values() if x.state is State.LENT and x.until <= now]:
            self._move(lease, Cause.LAPSE, now)
        if now >= self.frozen_until:
            self._watch(now, out)

    def _watch(self, now: float, out: list[Action]) -> None:
        """Ask those whom somebody waits for whether they run; pass over those who do not."""
        owing = {m for d in self._heirs for x in self.on[d] for m in x.members}
        owing |= {m for x in self.leases.values() if x.state not in {State.LENT, State.FENCED} and not x.running
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
            account = self._account(client)
            self.banks[client.device].returned(client.id, 0, account.taking, now)
            account.unwilling_until = inf
            self._touched.add(client.device)
        lease = self.leases.get(client.group.key)
        if lease and lease.occupies and client.id in lease.members:
            out += [Fenced(client=m, generation=lease.generation) for m in sorted(lease.members)]
            for m in lease.members:
                member = self.members.clients[m]
                if member.device:
                    self._account(member).want = 0
                self._short.pop(m, None)
            self._move(lease, Cause.FENCE, now)

    # ---- decisions -----------------------------------------------------------------------------

    def _advance(self, out: list[Action], now: float) -> list[Action]:
        if now < self.frozen_until:
            return out
        if self._touched:
            scope = self._scope(self._touched)
            self._touched.clear()
            self._decide(scope, now, out)
            self._counted |= scope
        for device in sorted(self._counted):
            self._plan(device, now, out)
        self._counted.clear()
        if self._host_touched:
            self._host_touched = False
            shared = (b.accounts for b in self.banks.values() if len(b.accounts) > 1)
            out += self.host.plan({c for accounts in shared for c in accounts})
        return out

    def _scope(self, seeds: Iterable[str]) -> set[str]:
        """The devices that a decision about these may concern: those that leases tie together."""
        found: set[str] = set()
        todo = [d for d in seeds if d in self.banks]
        while todo:
            device = todo.pop()
            if device in found:
                continue
            found.add(device)
            for lease in (*self.waiting[device], *self.on[device]):
                if len(lease.devices) > 1:
                    todo += lease.devices - found
        return found

    def _in_order(self, leases: list[Lease], now: float) -> list[Lease]:
        if len(leases) < 2:
            return leases
        return [leases[i] for i in self.policy.order([self._candidate(x, now) for x in leases], now)]

    def _candidate(self, lease: Lease, now: float) -> Candidate:
        job = self.members.jobs[lease.group[0]]
        job.advance(now)
        waits = lease.state is State.WAITING
        cost = (
            max((self._lacking(lease, d) * self.costs[d].per_page for d in lease.devices), default=0.0)
            if waits
            else 0.0
        )
        done = lease.ran + (0.0 if waits else now - (lease.began or now))
        return Candidate(
            arrived=lease.arrived,
            ran=0.0 if waits else max(now - lease.granted, 1e-9),
            remaining=max(0.0, (self._expected(lease) or 0.0) - done),
            cost=cost,
            priority=lease.priority + job.limits.priority,
            weight=job.limits.weight,
            elapsed=job.elapsed,
            solo=job.elapsed - job.blocked,
        )

    def _expected(self, lease: Lease) -> float | None:
        return lease.expected or self.durations.expect(lease.group[0], lease.phase)

    def _lacking(self, lease: Lease, device: str) -> int:
        accounts = self.banks[device].accounts
        return sum(max(0, accounts[m].want - accounts[m].held) for m in lease.members if m in accounts)

    def _decide(self, scope: set[str], now: float, out: list[Action]) -> None:
        """Grant what can be granted, find who is next where not, and recall whom they wait for."""
        found = {x.order: x for d in scope for x in self.waiting[d]}
        order = self._in_order([found[k] for k in sorted(found)], now)
        heirs: dict[str, Lease] = {}
        free_until: dict[str, float] = {}  # of devices that are kept for an heir that waits for others too
        for lease in order:
            group = self.members.groups[lease.group]
            if lease.until > now or not group.ready or lease.group in self.leases:
                continue
            blockers = {d: [x for x in self.on[d] if not self._together(x, lease)] for d in lease.devices}
            claimed = [d for d in lease.devices if d in heirs and not self._together(heirs[d], lease)]
            idle = claimed and not any(self.on[d] for d in lease.devices)
            if idle and now + self._needs(lease) <= min(free_until[d] for d in claimed):
                claimed = []  # it is over before the heir can begin
            if claimed or any(blockers.values()):
                until = max((self._busy_until(x, now) for xs in blockers.values() for x in xs), default=now)
                for d in lease.devices - heirs.keys():
                    heirs[d], free_until[d] = lease, until
                continue
            if not self._fits(lease):
                if any(self.on[d] for d in lease.devices):
                    for d in lease.devices - heirs.keys():
                        heirs[d], free_until[d] = lease, now
                continue  # else the pages are with somebody who is stopped: others go first
            if self._lent_to_none(lease, now):
                continue
            self._grant(lease, now, out)
        for d in scope:
            self._orders[d] = [x for x in order if x.state is State.WAITING and d in x.devices]
            self._heirs.pop(d, None)
            if d in heirs:
                self._heirs[d] = heirs[d]
                self._recall(d, heirs[d], now, out)

    def _together(self, a: Lease, b: Lease) -> bool:
        """Whether two leases may run beside each other: the less urgent one allows it."""
        pa, pb = (x.priority + self.members.jobs[x.group[0]].limits.priority for x in (a, b))
        return (a.overlap and pa > pb) or (b.overlap and pb > pa)

    def _fits(self, lease: Lease) -> bool:
        """Whether its pages can be had beside those of who runs, and without those of who is stopped."""
        for d in lease.devices:
            bank = self.banks[d]
            stopped = sum(a.held for a in bank.accounts.values() if a.unwilling_until == inf)
            if not stopped and not self.on[d]:
                continue
            needed = stopped
            for x in (*self.on[d], lease):
                for m in x.members & bank.accounts.keys():
                    a = bank.accounts[m]
                    needed += max(a.want, a.held if x.running else 0) - (a.own if not x.running else 0)
            if needed > bank.budget:
                return False
        return True

    def _needs(self, lease: Lease) -> float:
        """Seconds until a waiting lease would have given the device back, as expected."""
        expected = self._expected(lease)
        if not expected:
            return inf
        cost = max((self._lacking(lease, d) * self.costs[d].per_page for d in lease.devices), default=0.0)
        return max(0.0, expected - lease.ran) + 2 * cost

    def _busy_until(self, lease: Lease, now: float) -> float:
        """When a lease is expected to end; one that took longer than expected is taken to last as long again."""
        done = lease.ran + now - (lease.began or now)
        left = (self._expected(lease) or 0.0) - done
        return now + (left if left > 0 else done)

    def _lent_to_none(self, lease: Lease, now: float) -> bool:
        """Whether a device is lent, and this phase would not be over when its lender is back."""
        lent = [
            x for x in self.leases.values() if x.state is State.LENT and x.devices & lease.devices and x.until > now
        ]
        if not lent or self.policy.overdue(self._candidate(lease, now), now):
            return False
        return now + self._needs(lease) > min(x.until for x in lent)

    def _recall(self, device: str, heir: Lease, now: float, out: list[Action]) -> None:
        for lease in self.on[device]:
            if lease.state not in {State.ACTIVE, State.RECALLED} or self._together(lease, heir):
                continue
            waiting = self._candidate(heir, now)
            running = self._candidate(lease, now)
            press = self.policy.yields(running, waiting, now)
            if press or lease.state is State.ACTIVE:
                self._move(lease, Cause.PRESS if press else Cause.RECALL, now)
                recall = [Recall(client=m, generation=lease.generation, press=press) for m in sorted(lease.openers)]
                out += recall

    def _plan(self, device: str, now: float, out: list[Action]) -> None:
        """Give free pages to those that need them, and take what they lack."""
        bank, order = self.banks[device], self._orders[device]
        order = [x for x in order if x.state is State.WAITING]
        here = bank.accounts.keys()
        on = self.on[device]
        holders = [m for x in on for m in sorted(x.members & here)]
        heir = self._heirs.get(device)
        next_up = sorted(heir.members & here) if heir and heir.state is State.WAITING else []
        if not holders and not next_up:
            return
        spared = frozenset(holders)
        # What a running phase does not use is its heir's; until it runs, nobody knows.
        running = frozenset(m for x in on for m in x.members & x.ready if x.running)
        both = (spared - running) | frozenset(next_up)
        budgets = self.members.page_budgets(device)
        claims = [
            Claim(client=c, spared=spared, last=frozenset(next_up), **budgets.get(c, NO_BUDGET)) for c in holders
        ] + [
            Claim(client=c, spared=both, running=running, holders=spared, **budgets.get(c, NO_BUDGET)) for c in next_up
        ]
        waiting = [m for x in order for m in sorted(x.members & here)]
        plan = bank.plan(claims, now, waiting)
        out += plan.actions
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
                out.append(self._denial(self.members.clients[c], for_good=False))


def region_names(text: str) -> list[str]:
    """The distinct names of a request's regions, in the order of their bits in ``Ready.known``.

    The text has a line for each use: ``u``, ``l`` or ``w`` for used, lazy or written, and the name.
    """
    return list(dict.fromkeys(line[1:] for line in text.split("\n") if line[:1] in {"u", "l", "w"}))
