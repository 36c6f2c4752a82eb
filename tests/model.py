"""Exhaustive exploration of the scheduler with clients that do all that agents may do, at any moment.

A state is the scheduler, a model of each client, and the messages on their way to it. Every step that is
possible in a state is taken: a client asks, fills, runs, gives pages, gives up, fails, dies, is stopped, repeats an
old message; a message arrives; time passes. States that differ in nothing that matters are one. In each, the
promises hold; and from each in which all there is to do is to wait, if all behave from then on, everybody is served.

What clients send arrives at once: a message under way is the same as a client that acts later.
"""

from __future__ import annotations

import io
import pickle
from collections import deque
from dataclasses import astuple, dataclass, field, replace
from math import inf

from pymux import events as ev
from pymux.errors import ProtocolError
from pymux.lease import State
from pymux.policy import Policy, fifo
from pymux.scheduler import Scheduler

TICK = 6.0  # seconds that pass at once: more than half of what a client may be silent
PATIENT = 80  # rounds in which everybody behaves, before somebody who still waits is taken to be stuck


@dataclass(frozen=True)
class Setup:
    """Who is there, and how often what may happen."""

    name: str
    clients: tuple[tuple[str, str, int], ...]  # job, device ("": a controller), pages that its phases need
    joint: frozenset[str] = frozenset()  # jobs whose clients are one group
    budget: int = 2  # pages of a device
    phases: int = 1  # that each client opens
    crashes: int = 1
    stops: int = 0
    repeats: int = 1
    failures: int = 0
    giveups: int = 1
    ticks: int = 1
    loans: int = 0


@dataclass
class Client:
    """One agent, as far as the broker can tell."""

    id: int
    job: str
    device: str
    need: int
    joint: bool
    world: int
    rank: int
    alive: bool = True
    stopped: bool = False
    state: str = "idle"  # waiting, active, parked, leaving
    remote: bool = False
    granted: bool = False
    attached: bool = False
    acknowledged: bool = False
    recalled: bool = False
    fenced: bool = False
    lending: bool = False
    generation: int = 0
    seq: int = 0
    acquire_seq: int = 0
    held: int = 0
    owed: int = 0
    opened: int = 0
    inbox: list[ev.Action] = field(default_factory=list)

    @property
    def running(self) -> bool:
        return self.state == "active" or (self.state == "waiting" and (self.granted or self.attached))


class Violation(AssertionError):
    """A promise is broken; the message says which, and how it came to that."""


class World:
    """The scheduler and its clients."""

    def __init__(self, setup: Setup, policy: Policy | None = None) -> None:
        self.setup = setup
        self.now = 1.0
        self.left = {
            k: getattr(setup, k) for k in ("crashes", "stops", "repeats", "failures", "giveups", "ticks", "loans")
        }
        self.scheduler = Scheduler(policy or fifo(1e9), host_budget=1 << 40, unresponsive_after=10.0)
        for device in sorted({d for _, d, _ in setup.clients} - {""}):
            self.scheduler.add_device(device, 1 << 20, setup.budget, setup.budget)
        self.promises: dict[tuple[int, int], ev.Grant | None] = {}  # as the broker knows them
        self.clients: list[Client] = []
        for i, (job, device, need) in enumerate(setup.clients, 1):
            joint = job in setup.joint
            peers = [k for k, (j, d, _) in enumerate(setup.clients, 1) if j == job and d] if joint else [i]
            client = Client(
                id=i, job=job, device=device, need=need if device else 0, joint=joint,
                world=len(peers) if device else 0, rank=peers.index(i) if device else 0,
            )  # fmt: skip
            self.clients.append(client)
            self.send(
                ev.Joined(
                    client=i, job=job, name=str(i), group=job if joint else str(i), device=device,
                    page_size=1 << 20 if device else 0, rank=client.rank, world=client.world, joint=joint,
                )
            )  # fmt: skip

    # ---- both ways -------------------------------------------------------------------------------

    def send(self, event: ev.Event | ev.Tick) -> None:
        actions = self.scheduler.handle(event, self.now)
        promised = None
        if isinstance(event, ev.Release) and event.back == 0:
            promised = self.promises.pop((event.client, event.generation), None)
        if promised and promised not in actions:
            raise Violation(f"{promised} was promised")
        for action in actions:
            if isinstance(action, ev.Promise):
                self.promises[action.client, action.generation] = action.grant
                continue
            if isinstance(action, ev.Unresponsive):
                continue
            client = self.clients[action.client - 1]
            if client.alive:
                client.inbox.append(action)

    def counts(self, c: Client) -> ev.Counts:
        spare = c.held - (min(c.need, c.held) if c.running else 0)
        return ev.Counts(resident=c.held, dirty=spare)

    def receive(self, c: Client) -> None:  # csrc/agent_loop.cpp and agent_group.cpp, in short
        match c.inbox.pop(0):
            case ev.Grant(seq=seq, generation=g):
                if seq == 0:
                    if c.state == "idle":
                        c.state, c.remote = "waiting", True
                    if c.state != "waiting":
                        return
                    if c.remote:
                        c.granted = True
                    else:
                        c.attached = True
                elif c.state != "waiting" or c.remote or seq != c.acquire_seq:
                    self.send(ev.Cancel(client=c.id, seq=seq))
                    return
                else:
                    c.granted, c.attached = True, False
                c.acknowledged, c.generation = False, g
                self.want(c)
            case ev.Prepare():
                if c.state == "idle":
                    c.state, c.remote, c.granted, c.acknowledged = "waiting", True, False, False
                    self.want(c)
            case ev.Active(generation=g):
                if c.state == "waiting" and not c.remote and c.granted and g == c.generation and c.acknowledged:
                    c.state = "active"
            case ev.Drain(generation=g):
                self.drain(c, g)
            case ev.Ended(generation=g):
                if c.state == "leaving" and g == c.generation:
                    c.state = "idle"
            case ev.Recall(generation=g):
                if g == c.generation and c.state not in {"idle", "leaving"}:
                    if c.state == "parked":
                        self.release(c)
                    else:
                        c.recalled = True
            case ev.Take(count=n):
                c.owed += n
            case ev.Give(count=n):
                c.held += n
            case ev.Deny(seq=seq):
                if seq in {c.seq, c.acquire_seq} and c.state == "waiting":
                    self.give_up_grant(c)
            case ev.Ping():
                self.send(ev.Pong(client=c.id))
            case ev.Fenced(generation=g, requeued=requeued):
                self.fence(c, g, requeued=requeued)
            case ev.HostGrant():
                pass
            case other:
                raise AssertionError(other)

    def want(self, c: Client) -> None:
        if c.device and c.held < c.need:
            c.seq += 1
            self.send(ev.Want(client=c.id, seq=c.seq, want=c.need, counts=self.counts(c)))

    def drain(self, c: Client, g: int) -> None:
        if c.state == "waiting" and c.remote and not c.granted:
            c.state, c.remote = "idle", False
        if g == 0:
            return
        if g != c.generation:
            pass
        elif c.remote:
            c.state, c.remote, c.granted = "idle", False, False
        elif c.state == "waiting":
            c.granted = c.attached = c.acknowledged = False
        self.send(ev.Release(client=c.id, generation=g, counts=self.counts(c)))

    def fence(self, c: Client, g: int, *, requeued: bool) -> None:
        if g != c.generation:
            return
        if c.state == "active" and not c.remote:
            c.fenced = c.recalled = True
        elif c.state == "waiting" and not c.remote and (c.granted or c.attached):
            again = c.granted and not requeued
            c.granted = c.attached = c.acknowledged = False
            if again:
                self.ask(c)
        elif c.state in {"parked", "leaving"} or c.remote:
            c.state, c.remote, c.granted, c.recalled = "idle", False, False, False

    def ask(self, c: Client) -> None:
        c.seq += 1
        c.acquire_seq = c.seq
        spare = max(0, c.held - c.need)
        self.send(
            ev.Acquire(client=c.id, seq=c.seq, phase="p", want=max(c.need, c.held), own=spare, counts=self.counts(c))
        )

    def release(self, c: Client, back: float = 0.0) -> None:
        c.state, c.granted, c.attached, c.remote, c.recalled = "idle", False, False, False, False
        if c.fenced:
            c.fenced = False
            return
        self.send(ev.Release(client=c.id, generation=c.generation, back=back, counts=self.counts(c)))

    def give_up_grant(self, c: Client) -> None:
        if c.joint and (c.granted or c.attached):
            self.send(ev.Failed(client=c.id, generation=c.generation, text="cannot"))
            waits = c.granted and not c.remote
            c.granted = c.attached = c.acknowledged = False
            if waits:
                return
        elif not c.joint and c.granted:
            self.release(c)
            return
        c.remote, c.state = False, "idle"

    # ---- steps -----------------------------------------------------------------------------------

    def steps(self) -> list[tuple[str, int]]:
        """What may happen now; the first letter says whether it is a client's ordinary doing ('+')."""
        out: list[tuple[str, int]] = []
        for i, c in enumerate(self.clients):
            if not c.alive:
                continue
            if self.left["crashes"]:
                out.append(("crash", i))
            if c.stopped:
                out.append(("continue", i))
                continue
            if self.left["stops"]:
                out.append(("stop", i))
            out += [(name, i) for name in self.doings(c)]
            if c.state in {"idle", "parked"} and c.opened < self.setup.phases:
                out.append(("open", i))
            if c.state == "waiting" and c.remote and c.joint and c.opened < self.setup.phases:
                out.append(("open", i))
            if c.state == "waiting" and not c.remote and self.left["giveups"]:
                out.append(("give up", i))
            if c.running and c.state == "waiting" and c.joint and not c.acknowledged and self.left["failures"]:
                out.append(("fail", i))
            if self.left["repeats"] and c.generation:
                out.append(("repeat", i))
            if c.state == "active" and not c.remote and self.left["loans"]:
                out.append(("lend", i))
        if self.left["ticks"]:
            out.append(("tick", -1))
        return out

    def doings(self, c: Client) -> list[str]:
        """What a client that behaves does sooner or later."""
        out = []
        if c.inbox:
            out.append("+receive")
        if c.state == "waiting" and (c.granted or c.attached) and not c.acknowledged and c.held >= c.need:
            out.append("+ready")
        if c.owed:
            out.append("+give")
        if c.state == "active" and not c.remote:
            out.append("+leave")
        if c.lending and c.state == "idle":
            out.append("+return")
        return out

    def take(self, step: tuple[str, int]) -> None:
        name, i = step
        c = self.clients[i] if i >= 0 else None
        if name == "tick" or c is None:
            self.left["ticks"] -= 1
            self.tick()
        elif name == "+receive":
            self.receive(c)
        elif name == "+ready":
            c.acknowledged = True
            if not c.joint or c.remote:
                c.state = "active"
            self.send(ev.Ready(client=c.id, generation=c.generation, counts=self.counts(c)))
        elif name == "+give":
            self.give(c)
        elif name == "+leave":
            self.leave(c)
        elif name in {"open", "+return"}:
            if name == "open":
                c.opened += 1
            c.lending = False
            if c.state == "parked" and c.held >= c.need:
                c.state = "active"
                return
            if c.remote:
                c.attached, c.remote, c.acknowledged = c.running, False, False
            c.granted, c.state = c.state == "parked", "waiting"
            if c.granted:
                c.acknowledged = False
                self.want(c)
            else:
                self.ask(c)
        elif name == "lend":
            self.left["loans"] -= 1
            c.lending = True
            self.leave(c, back=3.0)
        elif name == "give up":
            self.left["giveups"] -= 1
            self.give_up(c)
        elif name == "fail":
            self.left["failures"] -= 1
            self.give_up_grant(c)
        elif name == "repeat":
            self.left["repeats"] -= 1
            self.repeat(c)
        elif name == "crash":
            self.left["crashes"] -= 1
            c.alive, c.inbox, c.held, c.owed, c.state = False, [], 0, 0, "dead"
            c.remote = c.granted = c.attached = c.stopped = c.lending = False
            self.send(ev.Left(client=c.id))
        elif name == "stop":
            self.left["stops"] -= 1
            c.stopped = True
        else:
            c.stopped = False

    def tick(self) -> None:
        self.now += TICK
        self.send(ev.Tick())

    def leave(self, c: Client, back: float = 0.0) -> None:
        if c.joint:
            fenced = c.fenced
            self.release(c, back)
            c.state = "idle" if fenced else "leaving"
        elif c.recalled or c.fenced or back:
            self.release(c, back)
        else:
            c.state = "parked"

    def give(self, c: Client) -> None:
        kept = min(c.need, c.held) if c.running else 0
        n = 1 if c.held > kept else 0
        missing = 0 if n else c.owed
        c.held -= n
        c.owed -= n or missing
        want = c.need if c.state == "waiting" else 0
        self.send(ev.Returned(client=c.id, count=n, missing=missing, want=want, counts=self.counts(c)))

    def give_up(self, c: Client) -> None:
        if c.attached:
            c.attached, c.acknowledged, c.remote, c.granted = False, False, True, True
            self.send(ev.Cancel(client=c.id, seq=c.acquire_seq))
        elif c.granted:
            self.release(c)
        else:
            c.state = "idle"
            self.send(ev.Cancel(client=c.id, seq=c.acquire_seq))

    def repeat(self, c: Client) -> None:
        """Messages of leases and requests that are over, and what was said already."""
        old = c.generation if c.state in {"idle", "dead"} else c.generation - 1
        self.send(ev.Release(client=c.id, generation=old, counts=self.counts(c)))
        self.send(ev.Ready(client=c.id, generation=old, counts=self.counts(c)))
        self.send(ev.Failed(client=c.id, generation=old, text="late"))
        self.send(ev.Cancel(client=c.id, seq=c.acquire_seq - 1))
        self.send(ev.Ran(client=c.id, phase="p", count=1, seconds=1.0))
        if c.device:
            want = c.need if c.state == "waiting" else 0
            self.send(ev.Returned(client=c.id, count=0, want=want, counts=self.counts(c)))
        if c.state in {"waiting", "active"} and not c.remote and not c.fenced and c.opened:
            try:
                self.ask(replace(c, inbox=[]))
            except ProtocolError:
                return
            c.seq += 1
            if c.state == "waiting":  # what it was granted before it asked again is not its any more
                c.acquire_seq = c.seq
                c.granted = c.attached = c.acknowledged = False
            elif not self.is_fenced(c):
                raise Violation("a running client's request was taken")

    # ---- promises --------------------------------------------------------------------------------

    def check(self) -> None:
        s = self.scheduler
        for device, bank in s.banks.items():
            active = {
                c.job if c.joint else c.id
                for c in self.clients
                if c.device == device and c.state == "active" and not c.fenced and not self.is_fenced(c)
            }
            self.promise(len(active) <= 1, f"two phases run on {device}")
            self.promise(len(s.table.on[device]) <= 1, f"two leases on {device}")
            there = sum(c.held + self.coming(c) for c in self.clients if c.device == device)
            self.promise(there <= bank.budget, f"{there} pages on {device}, which has {bank.budget}")
            booked = {c.id: c.held + self.coming(c) for c in self.clients if c.device == device and c.alive}
            self.promise({k: a.held for k, a in bank.accounts.items()} == booked, f"the bank of {device} is wrong")
        for lease in s.table.leases.values():
            self.promise(lease.members <= s.members.clients.keys(), "a lease has a member that is gone")
            on = {s.members.clients[m].device for m in lease.members} - {""}
            if lease.occupies:
                self.promise(all(lease in s.table.on[d] for d in on), "a lease is not on all its devices")
        for lease in s.table.queue:
            self.promise(lease.state is State.WAITING, "what waits is not waiting")
            self.promise(bool(lease.openers), "nobody opened what waits")
        for job in s.members.jobs.values():
            leases = [*s.table.leases.values(), *s.table.queue]
            mine = [x for x in leases if x.group[0] == job.name]
            waiting = sum(x.state in {State.WAITING, State.GRANTED} for x in mine)
            self.promise(job.waiting == waiting, f"job {job.name} is counted wrongly")

    def is_fenced(self, c: Client) -> bool:
        return any(isinstance(m, ev.Fenced) and m.generation == c.generation for m in c.inbox)

    def coming(self, c: Client) -> int:
        return sum(m.count for m in c.inbox if isinstance(m, ev.Give))

    def promise(self, kept: bool, what: str) -> None:
        if not kept:
            raise Violation(what)

    def serve(self) -> None:
        """From here on everybody behaves: nobody waits for ever."""
        for _ in range(PATIENT):
            if self.settled():
                return
            for c in self.clients:
                if c.alive and not c.stopped:
                    while (doings := self.doings(c)) and c.alive:
                        self.take((doings[0], c.id - 1))
                        self.check()
            self.tick()
        if any(c.stopped for c in self.clients):
            for c in self.clients:
                c.stopped = False
            self.serve()
            return
        waiting = [(c.id, c.state) for c in self.clients if c.alive and c.state not in {"idle", "parked"}]
        raise Violation(f"stuck: {waiting}; leases {[x.state.value for x in self.scheduler.table.leases.values()]}")

    def quiet(self) -> bool:
        """Whether nobody who behaves has anything to do but wait: elsewhere the next such step leads on to here."""
        return not any(self.doings(c) for c in self.clients if c.alive and not c.stopped)

    def settled(self) -> bool:
        return (
            all(
                not c.alive
                or c.stopped
                or (c.state in {"idle", "parked"} and not c.inbox and not c.owed and not c.lending)
                for c in self.clients
            )
            and not self.scheduler.table.queue
        )

    # ---- identity --------------------------------------------------------------------------------

    def key(self) -> bytes:
        """What matters of this state: no absolute times, numbers only relative to each other."""
        s = self.scheduler
        generations = {0: 0}

        def g(n: int) -> int:
            return generations.setdefault(n, len(generations))

        def lease(x: object) -> tuple[object, ...]:
            return (
                x.group, x.state.value, g(x.generation), sorted(x.openers), sorted(x.members), sorted(x.ready),
                sorted(x.released), x.attempts, x.until > self.now, sorted(x.prepared), bool(x.failure),
            )  # fmt: skip

        def message(m: ev.Action, c: Client) -> tuple[object, ...]:
            return (
                type(m).__name__, getattr(m, "requeued", 0), g(getattr(m, "generation", 0)), getattr(m, "count", 0),
                getattr(m, "seq", -1) == c.acquire_seq, getattr(m, "seq", -1) == c.seq, getattr(m, "seq", -1) == 0,
            )  # fmt: skip

        leases = [lease(x) for x in sorted(s.table.leases.values(), key=lambda x: x.order)]
        queue = [lease(x) for x in s.table.queue]
        banks = [
            (d, sorted((k, a.held, a.taking, a.want, a.own, astuple(a.counts), a.unwilling_until > self.now,
                        a.unwilling_until == inf) for k, a in b.accounts.items()))
            for d, b in s.banks.items()
        ]  # fmt: skip
        who = [
            (k, m.responsive, m.pinged > 0, self.now - m.heard >= 5.0, bool(m.group.lost), m.want_seq == 0)
            for k, m in s.members.clients.items()
        ]
        clients = [
            (c.alive, c.stopped, c.state, c.remote, c.granted, c.attached, c.acknowledged, c.recalled, c.fenced,
             c.lending, g(c.generation), c.held, c.owed, c.opened, c.seq == c.acquire_seq,
             [message(m, c) for m in c.inbox])
            for c in self.clients
        ]  # fmt: skip
        heirs = sorted(
            (d, x.order - min(y.order for y in s.table.queue)) for d, x in s._heirs.items() if x in s.table.queue
        )
        return pickle.dumps(
            (leases, queue, banks, who, clients, heirs, sorted(s.pages._short), sorted(self.left.items()))
        )


class _Pickler(pickle.Pickler):
    def persistent_id(self, obj: object) -> str | None:
        return "policy" if isinstance(obj, Policy) else None


class _Unpickler(pickle.Unpickler):
    policy: Policy

    def persistent_load(self, pid: str) -> Policy:  # noqa: ARG002
        return self.policy


def freeze(world: World) -> bytes:
    out = io.BytesIO()
    _Pickler(out, protocol=pickle.HIGHEST_PROTOCOL).dump(world)
    return out.getvalue()


def thaw(data: bytes, policy: Policy) -> World:
    unpickler = _Unpickler(io.BytesIO(data))
    unpickler.policy = policy
    world: World = unpickler.load()
    return world


def explore(setup: Setup, limit: int = 10**9) -> int:
    """Visit every state that can be reached, breadth first, so that the shortest way to a fault is found.

    Returns:
        How many states there are; with `limit`, at most so many.

    Raises:
        Violation: a promise is broken; the steps that lead there are in the message.
    """
    first = World(setup)
    policy = first.scheduler.dispatcher.policy
    seen = {first.key()}
    todo: deque[tuple[bytes, tuple[tuple[str, int], ...]]] = deque([(freeze(first), ())])
    while todo:
        frozen, path = todo.popleft()
        for step in thaw(frozen, policy).steps():
            world = thaw(frozen, policy)
            way = (*path, step)
            try:
                world.take(step)
                world.check()
                key = world.key()
                if key in seen:
                    continue
                seen.add(key)
                data = freeze(world)
                if world.quiet():
                    world.serve()
            except (AssertionError, ProtocolError, KeyError) as e:
                steps = "\n".join(f"  {name} {i + 1}" for name, i in way)
                raise Violation(f"{setup.name}: {type(e).__name__}: {e}\nafter\n{steps}") from e
            todo.append((data, way))
            if len(seen) >= limit:
                return len(seen)
    return len(seen)
