"""The node's broker: sockets, page descriptors and timers around the sans-IO scheduler.

It moves no bytes and opens no CUDA context. One process a node; it can be killed at any moment,
since clients keep their pages and tell the next broker what they hold.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import logging
import os
import resource
import select
import signal
import socket
import struct
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pymux import wire
from pymux.config import clip
from pymux.errors import ConfigError, DriverError, NotAllowed, ProtocolError, PymuxError
from pymux.events import (
    Acquire,
    Action,
    Active,
    Budget,
    Cancel,
    Counts,
    Deny,
    Drain,
    Ended,
    Event,
    Failed,
    Fenced,
    Give,
    Grant,
    HostGrant,
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
    Take,
    Tick,
    TrimHost,
    Unresponsive,
    Want,
)
from pymux.nvml import Nvml
from pymux.policy import make
from pymux.rules import Rules
from pymux.scheduler import Scheduler

log = logging.getLogger("pymux.broker")

RECOVERY_SECONDS = 1.0  # clients of a dead broker reconnect within milliseconds
BUDGET_SECONDS = 2.0  # how often NVML is asked
CONTEXT_HEADROOM = 0.10  # of a device whose contexts cost memory: room for activations
HOST_SHARE = 0.80  # of the host's memory (or its control group's) that swapped-out pages may have by default
REPORT_SECONDS = 0.2  # how long a status request waits for the clients' figures
MAX_OUTBOX = 4096  # messages to a client that does not read
MAX_PAGES = 1 << 30  # that a message may speak of; two PiB of the smallest ones
_PAGE_FIELDS = ("held", "want", "own", "count", "missing", "resident", "discardable", "clean", "dirty")
_IN_BYTES = ("host", "figures", "ran")
MAX_REGIONS = 1024  # whose figures a client may tell
MAX_SPILL_PATH = 255  # bytes; the welcome message has room for so many
MAX_REQUEST = 4096  # bytes of a client's message; the longest names regions, in a thousand
_ANCILLARY = socket.CMSG_SPACE(4 * wire.MAX_FDS)
# As plain numbers: arithmetic with Python's flag types takes longer than the calls.
_TRUNCATED, _DESCRIPTORS_LOST = int(socket.MSG_TRUNC), int(socket.MSG_CTRUNC)
_DONT_WAIT, _NO_SIGNAL = int(socket.MSG_DONTWAIT), int(socket.MSG_NOSIGNAL)
SO_PEERGROUPS = 59  # <asm-generic/socket.h>; Python's socket module has no name for it


@dataclass(slots=True)
class Peer:
    """One connection."""

    sock: socket.socket
    id: int
    pid: int
    job: str = ""
    name: str = ""
    device: str = ""
    observer: bool = False
    joined: bool = False
    regions: str = ""  # of the acquire that follows
    promise: Promised | None = None
    figures: dict[str, dict[str, int]] = field(default_factory=dict)  # of its regions, as last told
    coming: dict[str, dict[str, int]] = field(default_factory=dict)  # of an answer that is not whole yet
    outbox: deque[tuple[bytes, list[int]]] = field(default_factory=deque)
    death: int = -1  # a pidfd: readable once the process has ended, whoever inherited its socket
    writing: bool = False  # whether the loop watches for room in its socket

    def __str__(self) -> str:
        return f"{self.job or '?'}/{self.name or '?'} (pid {self.pid})"


@dataclass(frozen=True, slots=True)
class Promised:
    """What is sent to whom as soon as a release comes; see events.Promise."""

    release: bytes  # how its message begins
    heir: Peer
    packet: bytes
    grant: Grant


@dataclass(slots=True)
class Inquiry:
    """A status request that waits for the clients' figures."""

    observer: int
    missing: set[int]
    due: float


@dataclass(slots=True)
class Device:
    """A device, and the page descriptors that nobody holds."""

    page_size: int
    total: int  # bytes
    fds: list[int] = field(default_factory=list)


def _counts(m: dict[str, Any]) -> Counts:
    return Counts(resident=m["resident"], discardable=m["discardable"], clean=m["clean"], dirty=m["dirty"])


class AlreadyRunning(PymuxError):
    """Another broker has this node."""


class Broker:
    """Serves one runtime directory.

    Args:
        runtime_dir: where socket and lock are; created 0700.
        nvml: where device memory is read.
        capacity: bytes of each device that regions may have; 0: all that others leave.
        host_budget: bytes of host memory that clients may pin; 0: most of it.
        spill_dir: where clients put what the host has no memory for; None: nowhere.
        rules: the policy, and what jobs may have.
        linger: seconds without clients after which it ends; None: never.

    Raises:
        AlreadyRunning: another broker holds the lock.
        NotAllowed: the directory is not this user's alone.
    """

    def __init__(
        self,
        runtime_dir: Path,
        nvml: Nvml,
        *,
        capacity: int = 0,
        host_budget: int = 0,
        spill_dir: Path | None = None,
        rules: Rules | None = None,
        linger: float | None = 30.0,
    ) -> None:
        rules = rules or Rules()
        self._rules = rules
        self._groups = rules.group_ids()
        self._capacity = capacity
        self._spill_dir = str(spill_dir.resolve()) if spill_dir else ""
        self._nvml = nvml
        self._linger = linger
        _private_directory(runtime_dir, self._groups)
        self._lock = os.open(runtime_dir / "broker.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(self._lock)
            raise AlreadyRunning(f"a broker already serves {runtime_dir}") from None
        os.ftruncate(self._lock, 0)
        os.write(self._lock, str(os.getpid()).encode())
        self._path = runtime_dir / "broker.sock"
        # A socket file without a broker means that one died: its clients are about to come back.
        orphaned = self._path.exists()
        self._path.unlink(missing_ok=True)
        now = time.monotonic()
        self._scheduler = Scheduler(
            make(rules.policy, rules.max_wait),
            host_budget=host_budget or int(HOST_SHARE * host_memory()),
            frozen_until=now + RECOVERY_SECONDS if orphaned else 0.0,
            limits=rules.jobs,
            default_limits=rules.default,
            unresponsive_after=rules.unresponsive_after,
        )
        if orphaned:
            log.info("taking over from a broker that died; waiting %.1f s for its clients", RECOVERY_SECONDS)
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
        self._listener.bind(str(self._path))
        if self._groups:
            _open_to_groups(runtime_dir, self._path, self._groups)
        self._listener.listen(1024)
        self._listener.setblocking(False)
        self._poll = select.epoll()
        self._poll.register(self._listener, select.EPOLLIN)
        self._wake_r, self._wake_w = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._poll.register(self._wake_r, select.EPOLLIN)
        self._peers: dict[int, Peer] = {}
        self._by_fd: dict[int, Peer] = {}
        self._devices: dict[str, Device] = {}
        self._inquiries: list[Inquiry] = []
        self._next_id = 1
        # To refuse a client with when there are no more descriptors.
        self._spare_fd = os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC)
        self._idle_since = now
        self._budget_at = now
        self._tick_at = self._scheduler.next_deadline(now)
        self._stopping = False

    # ---- the loop ------------------------------------------------------------------------------

    def stop(self) -> None:
        """End run() soon; from any thread or a signal handler."""
        self._stopping = True
        with contextlib.suppress(BlockingIOError):
            os.write(self._wake_w, b"x")

    def run(self) -> None:
        """Serve until stopped, or until nobody has been connected for `linger` seconds."""
        try:
            while not self._stopping:
                for fd, mask in self._poll.poll(self._timeout()):
                    if peer := self._by_fd.get(fd):
                        if fd == peer.death:
                            self._read(peer)  # what it said before it died
                            self._drop(peer)
                            continue
                        if mask & ~select.EPOLLOUT:
                            self._read(peer)
                        if mask & select.EPOLLOUT:
                            self._flush(peer)
                    elif fd == self._listener.fileno():
                        self._accept()
                    else:
                        with contextlib.suppress(BlockingIOError):
                            os.read(self._wake_r, 4096)
                self._timers()
        finally:
            self._close()

    def _timeout(self) -> float | None:
        now = time.monotonic()
        due = [self._tick_at] if self._tick_at is not None else []
        due += [i.due for i in self._inquiries]
        if self._devices:
            due.append(self._budget_at + BUDGET_SECONDS)
        if self._linger is not None and not self._clients():
            due.append(self._idle_since + self._linger)
        return max(0.0, min(due) - now) if due else None

    def _clients(self) -> int:
        return sum(p.joined for p in self._peers.values())

    def _timers(self) -> None:
        now = time.monotonic()
        self._answer(now)
        if self._tick_at is not None and now >= self._tick_at:
            if 0 < self._scheduler.frozen_until <= now:
                self._budget_at = now - BUDGET_SECONDS  # who is back after a broker's death is counted now
            self._handle(Tick(), now)
        if now >= self._budget_at + BUDGET_SECONDS:
            self._budget_at = now
            for name in self._devices:
                try:
                    pages = self._budget(name)
                except DriverError as e:
                    log.warning("the budget stays as it is: %s", e)
                    continue
                self._handle(Budget(device=name, pages=pages), now)
        if self._linger is not None and not self._clients() and now - self._idle_since >= self._linger:
            log.info("no clients for %.0f s: leaving", self._linger)
            self._stopping = True

    def _close(self) -> None:
        for peer in list(self._peers.values()):
            peer.sock.close()
            if peer.death >= 0:
                os.close(peer.death)
        for device in self._devices.values():
            for fd in device.fds:
                os.close(fd)
        self._listener.close()
        self._path.unlink(missing_ok=True)
        os.close(self._spare_fd)
        self._poll.close()
        os.close(self._wake_r)
        os.close(self._wake_w)
        os.close(self._lock)

    # ---- connections ---------------------------------------------------------------------------

    def _accept(self) -> None:
        try:
            sock, _ = self._listener.accept()
        except OSError as e:
            log.warning("cannot accept a connection: %s", e)
            if e.errno in {errno.EMFILE, errno.ENFILE}:
                self._refuse()
            return
        pid, uid, gid = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
        sock.setblocking(False)
        peer = Peer(sock=sock, id=self._next_id, pid=pid)
        self._next_id += 1
        self._peers[peer.id] = self._by_fd[sock.fileno()] = peer
        self._poll.register(sock, select.EPOLLIN)
        self._watch_death(peer)
        if uid not in {os.getuid(), 0} and not self._groups & {gid, *_supplementary_groups(sock)}:
            self._reject(
                peer,
                NotAllowed(
                    "this broker serves another user. Set PYMUX_RUNTIME_DIR to your own, or have its broker started "
                    "with --allow-group."
                ),
            )

    def _watch_death(self, peer: Peer) -> None:
        """Notice the end of a process also while a child that it forked has its socket open."""
        try:
            peer.death = os.pidfd_open(peer.pid)
        except (OSError, AttributeError) as e:  # of another pid namespace, an old kernel, or ended already
            log.debug("%s: its socket alone tells of its end (%s)", peer, e)
            return
        self._by_fd[peer.death] = peer
        self._poll.register(peer.death, select.EPOLLIN)

    def _refuse(self) -> None:
        """Tell who waits at the door that there are no file descriptors left, by means of the spare one."""
        os.close(self._spare_fd)
        try:
            sock, _ = self._listener.accept()
        except OSError:
            pass
        else:
            text = "the broker has no file descriptors left for more clients. Raise its limit (ulimit -n)."
            with contextlib.suppress(OSError):
                sock.send(wire.encode("error", code=wire.ERROR_CODES["NotAllowed"], text=text))
            sock.close()
        self._spare_fd = os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC)

    def _read(self, peer: Peer) -> None:
        for _ in range(16):  # then the others get a turn
            try:
                packet, ancillary, flags, _ = peer.sock.recvmsg(MAX_REQUEST, _ANCILLARY, _DONT_WAIT)
            except BlockingIOError:
                return
            except OSError:
                packet, ancillary, flags = b"", [], 0
            promise = peer.promise
            if promise and packet.startswith(promise.release):  # everything else can wait
                heir = promise.heir
                try:
                    if heir.outbox:
                        raise BlockingIOError
                    heir.sock.send(promise.packet, _NO_SIGNAL)
                except OSError:
                    self._send(heir, promise.packet)
            fds = [fd for _, _, data in ancillary for (fd,) in struct.iter_unpack("i", data)] if ancillary else []
            if not packet and not fds:
                self._drop(peer)
                return
            try:
                if flags & _TRUNCATED:
                    raise ProtocolError("an oversized message")
                if flags & _DESCRIPTORS_LOST:  # the kernel closed those: the memory is free, the credit stays
                    log.warning("out of file descriptors: some pages of %s are freed instead of passed", peer)
                self._message(peer, packet, fds)
            except PymuxError as e:
                self._reject(peer, e)
                return
            finally:
                for fd in fds:
                    os.close(fd)
            if peer.id not in self._peers:
                return

    def _reject(self, peer: Peer, error: PymuxError) -> None:
        log.warning("%s: %s: %s", peer, type(error).__name__, error)
        code = wire.ERROR_CODES.get(type(error).__name__, wire.ERROR_CODES["ProtocolError"])
        need, limit = getattr(error, "need", 0), getattr(error, "limit", 0)
        self._send(peer, wire.encode("error", code=code, text=str(error), need=need, limit=limit))
        self._drop(peer)

    def _drop(self, peer: Peer) -> None:
        if self._peers.pop(peer.id, None) is None:
            return
        del self._by_fd[peer.sock.fileno()]
        self._poll.unregister(peer.sock)
        peer.sock.close()
        if peer.death >= 0:
            del self._by_fd[peer.death]
            self._poll.unregister(peer.death)
            os.close(peer.death)
        for _, fds in peer.outbox:
            if fds:
                self._devices[peer.device].fds += fds
        if peer.joined:
            log.info("%s left", peer)
            now = time.monotonic()
            self._idle_since = now
            self._handle(Left(client=peer.id), now)

    # ---- messages ------------------------------------------------------------------------------

    def _message(self, peer: Peer, packet: bytes, fds: list[int]) -> None:
        name, m = wire.decode(packet)
        if name not in _IN_BYTES and any(m.get(field, 0) > MAX_PAGES for field in _PAGE_FIELDS):
            raise ProtocolError(f"message {name} with more pages than there are anywhere")
        now = time.monotonic()
        if name == "hello":
            self._hello(peer, m, now)
            return
        if name == "status" and (peer.observer or peer.joined):
            self._inquire(peer, now)
            return
        if not peer.joined:
            raise ProtocolError(f"message {name} before hello")
        event: Event
        match name:
            case "acquire":
                event = Acquire(
                    client=peer.id,
                    seq=m["seq"],
                    phase=m["phase"],
                    want=m["want"],
                    own=m["own"],
                    expected=m["expected_us"] / 1e6,
                    ran=m["ran_us"] / 1e6,
                    priority=m["priority"],
                    overlap=bool(m["flags"] & wire.OVERLAP),
                    ranks=frozenset(i for i in range(64) if m["ranks"] >> i & 1) if m["ranks"] else frozenset(),
                    regions=peer.regions,
                    opener=m["opener"],
                    counts=_counts(m),
                )
                peer.regions = ""
            case "release":
                event = Release(client=peer.id, generation=m["generation"], back=m["back_us"] / 1e6, counts=_counts(m))
            case "ready":
                event = Ready(
                    client=peer.id,
                    generation=m["generation"],
                    want=m["want"],
                    known=m["known"],
                    counts=_counts(m),
                )
            case "ran":
                event = Ran(client=peer.id, phase=m["phase"], count=m["count"], seconds=m["total_us"] / 1e6)
            case "names":
                peer.regions = m["regions"]
                return
            case "failed":
                event = Failed(client=peer.id, generation=m["generation"], text=m["text"], for_good=bool(m["for_good"]))
            case "pong":
                event = Pong(client=peer.id)
            case "kept":
                event = Kept(client=peer.id, generation=m["generation"], opener=m["opener"])
            case "queued":
                event = Queued(client=peer.id, seq=m["seq"], opener=m["opener"], behind=m["behind"])
            case "want":
                event = Want(client=peer.id, seq=m["seq"], want=m["want"], own=m["own"], counts=_counts(m))
            case "host":
                event = HostWant(client=peer.id, want=m["want"], urgent=bool(m["urgent"]))
            case "figures":
                self._figures(peer, m)
                return
            case "cancel":
                event = Cancel(client=peer.id, seq=m["seq"])
            case "pages":
                if len(fds) > m["count"] or (fds and not peer.device):
                    raise ProtocolError(f"{len(fds)} descriptors for {m['count']} pages")
                self._devices[peer.device].fds += fds
                fds.clear()
                event = Returned(
                    client=peer.id, count=m["count"], missing=m["missing"], want=m["want"], counts=_counts(m)
                )
            case _:
                raise ProtocolError(f"message {name} is not for the broker")
        promise = peer.promise
        if promise and name == "release" and packet.startswith(promise.release):
            peer.promise = None
            actions = self._scheduler.handle(event, now)
            actions.remove(promise.grant)  # is on its way already
            self._perform(actions, now)
            return
        self._handle(event, now)

    def _hello(self, peer: Peer, m: dict[str, Any], now: float) -> None:
        if peer.joined or peer.observer:
            raise ProtocolError("a second hello")
        if m["flags"] & wire.OBSERVER:
            peer.observer = True
            self._send(peer, wire.encode("welcome", version=wire.VERSION, client=peer.id))
            return
        controller = bool(m["flags"] & wire.CONTROLLER)
        if not m["job"] or not m["client"] or not (m["page_size"] or controller) or m["rank"] >= m["world"]:
            raise ProtocolError("a hello without job, name or page size, or with rank >= world")
        peer.job, peer.name = m["job"], m["client"]
        if not controller:
            device = wire.device_name(m["uuid"])
            self._add_device(device, m["page_size"])
            peer.device = device
        actions = self._scheduler.handle(
            Joined(
                client=peer.id,
                job=peer.job,
                name=peer.name,
                group=m["group"],
                device=peer.device,
                page_size=m["page_size"],
                rank=m["rank"],
                world=m["world"],
                joint=bool(m["flags"] & wire.JOINT),
                held=m["held"],
                lease_generation=m["lease_generation"],
                opener=bool(m["flags"] & wire.OPENER),
                phase=m["phase"],
                host_pinned=m["host_pinned"],
                need=m["need"],
                host_need=m["host_need"],
                process=peer.pid,
                counts=_counts(m),
            ),
            now,
        )
        peer.joined = True
        log.info("%s joined with %d pages", peer, m["held"])
        budget = self._scheduler.banks[peer.device].budget if peer.device else 0
        self._send(
            peer,
            wire.encode("welcome", version=wire.VERSION, client=peer.id, budget=budget, spill_dir=self._spill_dir),
        )
        self._perform(actions, now)  # the first of them may be for this client: after its welcome

    def _inquire(self, peer: Peer, now: float) -> None:
        """Ask the clients for their figures; the answer goes out when they are there, or too late."""
        clients = [p for p in self._peers.values() if p.joined]
        self._inquiries.append(Inquiry(observer=peer.id, missing={p.id for p in clients}, due=now + REPORT_SECONDS))
        for p in clients:
            p.coming = {}
            self._send(p, wire.encode("report"))
        self._answer(now)

    def _figures(self, peer: Peer, m: dict[str, Any]) -> None:
        name = m.pop("region")
        if name:
            if len(peer.coming) >= MAX_REGIONS:
                raise ProtocolError("figures of too many regions")
            peer.coming[name] = m
            return
        peer.figures, peer.coming = peer.coming, {}
        for inquiry in self._inquiries:
            inquiry.missing.discard(peer.id)
        self._answer(time.monotonic())

    def _answer(self, now: float) -> None:
        for inquiry in list(self._inquiries):
            inquiry.missing &= self._peers.keys()
            if inquiry.missing and now < inquiry.due:
                continue
            self._inquiries.remove(inquiry)
            if peer := self._peers.get(inquiry.observer):
                self._send(peer, wire.encode_status_reply(json.dumps(self._describe(now))))

    def _handle(self, event: Event | Budget | Tick, now: float) -> None:
        """Let the scheduler decide, then do what it says."""
        self._perform(self._scheduler.handle(event, now), now)

    def _perform(self, actions: list[Action], now: float) -> None:
        self._tick_at = self._scheduler.next_deadline(now)
        for action in actions:
            self._do(action)
        for name, device in self._devices.items():
            if device.fds:
                self._trim(name)

    def _do(self, action: Action) -> None:
        peer = self._peers.get(action.client)
        if peer is None:
            return
        match action:
            case Grant(seq=seq, generation=generation):
                if action.regions:
                    self._send(peer, wire.encode("regions", regions=action.regions))
                self._send(peer, wire.encode("grant", seq=seq, generation=generation, phase=action.phase))
            case Promise(generation=generation, grant=grant):
                peer.promise = None
                if grant:
                    peer.promise = Promised(
                        release=wire.encode("release", generation=generation)[: wire.RELEASE_PROMISED],
                        heir=self._peers[grant.client],
                        packet=wire.encode("grant", seq=grant.seq, generation=grant.generation),
                        grant=grant,
                    )
            case Recall(generation=generation, press=press):
                extend = int(min(action.extend, 3600.0) * 1e6)
                self._send(peer, wire.encode("recall", generation=generation, extend_us=extend, press=int(press)))
            case Prepare():
                if action.regions:
                    self._send(peer, wire.encode("regions", regions=action.regions))
                self._send(peer, wire.encode("prepare", phase=action.phase))
            case Active(generation=generation) | Drain(generation=generation) | Ended(generation=generation):
                self._send(peer, wire.encode(type(action).__name__.lower(), generation=generation))
            case Fenced(generation=generation, requeued=requeued):
                self._send(peer, wire.encode("fenced", generation=generation, requeued=int(requeued)))
            case Ping() | TrimHost():
                self._send(peer, wire.encode("ping" if isinstance(action, Ping) else "trim"))
            case Notice(text=text):
                self._send(peer, wire.encode("notice", text=text))
                log.warning("%s: %s", peer, text)
            case Unresponsive(seconds=seconds):
                log.warning("%s has not answered for %.1f s: its lease goes to others", peer, seconds)
                if self._rules.kill_unresponsive:
                    log.warning("%s is killed, as --kill-unresponsive says", peer)
                    with contextlib.suppress(ProcessLookupError, PermissionError):
                        os.kill(peer.pid, signal.SIGKILL)
            case Take(count=count):
                self._send(peer, wire.encode("take", count=count))
            case Give(count=count):
                pool = self._devices[peer.device].fds
                while count > 0:
                    part = min(count, wire.MAX_FDS)
                    fds = [pool.pop() for _ in range(min(part, len(pool)))]
                    self._send(peer, wire.encode("give", count=part), fds)
                    count -= part
            case HostGrant(granted=granted, exhausted=exhausted):
                self._send(peer, wire.encode("host_grant", granted=granted, exhausted=int(exhausted)))
            case Deny():
                code = wire.ERROR_CODES[action.error]
                self._send(
                    peer,
                    wire.encode(
                        "deny",
                        seq=action.seq,
                        need=action.need,
                        budget=action.budget,
                        code=code,
                        text=action.text,
                    ),
                )
                log.warning("%s: %s", peer, action.text)
            case _:
                raise AssertionError(action)

    def _send(self, peer: Peer, packet: bytes, fds: list[int] | None = None) -> None:
        peer.outbox.append((packet, fds or []))
        self._flush(peer)

    def _flush(self, peer: Peer) -> None:
        if peer.id not in self._peers:
            return
        while peer.outbox:
            packet, fds = peer.outbox[0]
            try:
                if fds:
                    socket.send_fds(peer.sock, [packet], fds, _NO_SIGNAL)
                else:
                    peer.sock.send(packet, _NO_SIGNAL)
            except BlockingIOError:
                if len(peer.outbox) > MAX_OUTBOX:
                    log.warning("%s does not read its messages: dropped", peer)
                    self._drop(peer)
                    return
                break
            except OSError:
                return  # reading sees the end and drops it, with what is in the outbox
            for fd in fds:
                os.close(fd)
            peer.outbox.popleft()
        if peer.writing != bool(peer.outbox):
            peer.writing = bool(peer.outbox)
            self._poll.modify(peer.sock, select.EPOLLIN | (select.EPOLLOUT if peer.writing else 0))

    # ---- devices -------------------------------------------------------------------------------

    def _add_device(self, name: str, page_size: int) -> None:
        if name in self._devices:
            return
        self._devices[name] = Device(page_size=page_size, total=self._nvml.memory(name).total)
        self._scheduler.add_device(name, page_size, self._budget(name), self._room(name, 0))

    def _budget(self, name: str) -> int:
        """Pages for clients: all memory but what NVML says that others use."""
        device = self._devices[name]
        if self._scheduler.frozen_until:
            return self._room(name, 0)  # most of what is used is clients' that are not back yet
        managed = len(device.fds)
        if name in self._scheduler.banks:
            managed += sum(a.held for a in self._scheduler.banks[name].accounts.values())
        others = max(0, self._nvml.memory(name).used - managed * device.page_size)
        if others:
            others = max(others, int(device.total * CONTEXT_HEADROOM))
        return self._room(name, others)

    def _room(self, name: str, others: int) -> int:
        """Pages for clients when others use so many bytes."""
        device = self._devices[name]
        room = device.total - others
        return (min(room, self._capacity) if self._capacity else room) // device.page_size

    def _trim(self, name: str) -> None:
        """Close descriptors that the budget has no room for, or no client is there for: others may use the memory."""
        device, bank = self._devices[name], self._scheduler.banks[name]
        room = max(bank.free, 0) if bank.accounts else 0
        while len(device.fds) > room:
            os.close(device.fds.pop())

    def _describe(self, now: float) -> dict[str, Any]:
        out = self._scheduler.describe(now)
        out["pid"] = os.getpid()
        for device in out["devices"]:
            device["free_descriptors"] = len(self._devices[device["uuid"]].fds)
        peers = {(p.job, p.name): p for p in self._peers.values() if p.joined}
        for client in out["clients"]:
            peer = peers[client["job"], client["name"]]
            client["pid"] = peer.pid
            client["regions"] = {
                name: {f"{key}_bytes": value for key, value in m.items()} for name, m in peer.figures.items()
            }
        out["spill_dir"] = self._spill_dir
        return out


def host_memory() -> int:
    """Bytes of memory that this process may use at most: the host's, or its control group's."""
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    limits = [total]
    for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        with contextlib.suppress(OSError, ValueError):
            limits.append(int(Path(path).read_text()))
    return min(limits)


def check_spill_dir(path: Path) -> None:
    """Raise ConfigError when a spill file cannot be made there."""
    if len(os.fsencode(path.resolve())) > MAX_SPILL_PATH:
        raise ConfigError(f"the spill directory's path is longer than {MAX_SPILL_PATH} bytes: {clip(str(path))}")
    if not path.is_dir() or not os.access(path, os.W_OK | os.X_OK):
        raise ConfigError(
            f"{clip(str(path))} is not a directory that this user can write to. Make one, or leave --spill-dir out."
        )


def _supplementary_groups(sock: socket.socket) -> list[int]:
    """The groups of the process at the other end, beside its own."""
    try:
        packed = sock.getsockopt(socket.SOL_SOCKET, SO_PEERGROUPS, 1024)
    except OSError:
        return []
    return [gid for (gid,) in struct.iter_unpack("I", packed)]


def _open_to_groups(directory: Path, path: Path, groups: frozenset[int]) -> None:
    """Let other users' processes reach the socket; which of them may stay, their credentials say."""
    group = next(iter(groups))
    wide = len(groups) > 1  # a file has one group; for more, the door is open and each is asked at it
    for at, mode in ((directory, 0o711 if wide else 0o710), (path, 0o666 if wide else 0o660)):
        os.chown(at, -1, group)
        at.chmod(mode)


def _private_directory(path: Path, groups: frozenset[int]) -> None:
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        info = path.stat()
    except OSError as e:
        raise ConfigError(
            f"{path} cannot be made: {e.strerror}. Set PYMUX_RUNTIME_DIR to a directory of your own."
        ) from e
    if info.st_uid != os.getuid():
        raise NotAllowed(f"{path} belongs to another user. Set PYMUX_RUNTIME_DIR to a directory of your own.")
    if info.st_mode & (0o022 if groups else 0o077):
        raise NotAllowed(f"{path} is open to others. Run 'chmod 700 {path}', or set PYMUX_RUNTIME_DIR.")


def serve(
    runtime_dir: Path,
    driver_path: str,
    *,
    capacity: int,
    host_budget: int,
    spill_dir: Path | None,
    rules: Rules,
    linger: float | None,
    serving: Callable[[], None] = lambda: None,
) -> None:
    """Run a broker in this process until it is told to stop.

    Arguments as `Broker`'s; `serving` is called when it listens.

    Raises:
        AlreadyRunning: another broker serves the directory.
        ConfigError: the spill directory is not usable.
        DriverError: NVML is missing.
        NotAllowed: the directory is not this user's alone.
    """
    if spill_dir:
        check_spill_dir(spill_dir)
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # a descriptor for each free page
    broker = Broker(
        runtime_dir,
        Nvml(driver_path),
        capacity=capacity,
        host_budget=host_budget,
        spill_dir=spill_dir,
        rules=rules,
        linger=linger,
    )
    for sig in (signal.SIGTERM, signal.SIGINT):
        signal.signal(sig, lambda *_: broker.stop())
    serving()
    broker.run()
