"""The page bank of one device: who holds how many pages, and whose to take next. Pure.

Invariants: the pages that clients hold and the free ones add up to the budget (free is negative
while a shrunken budget is being recovered); a page is counted for one client; nothing is taken
from a holder but what it can do without.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from math import inf

from pymux.events import Counts, Give, Take

OVERDUE = 3.0  # times the usual absence, after which a client is not expected back soon
_ANY = 1 << 62  # pages: no limit
RETRY_SECONDS = 0.2  # after which a client that could not give pages is asked again


@dataclass(slots=True)
class Account:
    """What the bank knows of one client, in pages."""

    held: int = 0
    taking: int = 0  # asked back, not yet returned
    want: int = 0  # what it must hold for what it waits for
    own: int = 0  # held, and not needed by its own phase
    counts: Counts = field(default_factory=Counts)
    used_at: float = 0.0  # when its last phase ended
    away: float | None = None  # seconds from the end of a lease to the next request, lately
    unneeded: int = 0  # the most that it could give while it ran, in its latest lease
    unneeded_before: int = 0  # and in the one before
    unwilling_until: float = 0.0  # it could not give what was asked; asked again after this


@dataclass(frozen=True, kw_only=True, slots=True)
class Claim:
    """A client whose want is to be met, and whom it must not take from.

    ``spared`` are never touched; ``last`` only when nothing else is left; of ``running`` only what they
    counted as unneeded. ``holders`` have the device, running or about to. ``kin`` are the clients of the claimant's
    job, where they may hold ``limit`` pages together.
    """

    client: int
    spared: frozenset[int]
    last: frozenset[int] = frozenset()
    running: frozenset[int] = frozenset()
    holders: frozenset[int] = frozenset()
    limit: int | None = None
    kin: frozenset[int] = frozenset()


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """What to do now, and which claims nothing can meet at present."""

    actions: list[Give | Take]
    short: list[int]


class Bank:
    """Counts the pages of a device."""

    def __init__(self, page_size: int, budget: int, capacity: int) -> None:
        self.page_size = page_size  # bytes
        self.budget = budget  # pages for clients now
        self.capacity = capacity  # pages for clients at best, when nobody else uses the device
        self.accounts: dict[int, Account] = {}

    @property
    def free(self) -> int:
        """Pages that nobody holds."""
        return self.budget - sum(a.held for a in self.accounts.values())

    @property
    def taking(self) -> bool:
        """Whether pages are on their way back."""
        return any(a.taking for a in self.accounts.values())

    def open(self, client: int, held: int, counts: Counts) -> None:
        """Count a client in, with what it brings."""
        self.accounts[client] = Account(held=held, counts=counts)

    def close(self, client: int) -> None:
        """Count a client out; what it held is free."""
        del self.accounts[client]

    def asked(self, client: int, now: float) -> None:
        """Learn how long a client was away, as it asks for the device again."""
        account = self.accounts[client]
        if account.used_at > 0:
            away = now - account.used_at
            account.away = away if account.away is None else (account.away + away) / 2

    def runs(self, client: int, counts: Counts) -> None:
        """Note what a running client could give."""
        account = self.accounts[client]
        account.counts = counts
        account.unneeded = max(account.unneeded, counts.discardable + counts.clean + counts.dirty)

    def ended(self, client: int, now: float) -> None:
        """Note that a client's lease is over."""
        account = self.accounts[client]
        account.used_at = now
        account.unneeded_before, account.unneeded = account.unneeded, 0

    def returned(self, client: int, count: int, missing: int, now: float) -> None:
        """Book pages that a client gave back, and those it could not give."""
        account = self.accounts[client]
        account.held -= min(count, account.held)
        account.taking = max(0, account.taking - count - missing)
        if missing:
            account.unwilling_until = now + RETRY_SECONDS

    def plan(self, claims: Sequence[Claim], now: float, waiting: Sequence[int] = ()) -> Plan:
        """Give free pages to the claims in order, and take what they lack.

        Taken are as few pages as the claims lack: discardable before clean before dirty; of these from the
        client that will need them last. Those that are away for much longer than usual, or were never away,
        come first, least recently used before others; then the one that is expected back last: jobs take
        turns, and least recently used would be who is back next. Who is expected back before the running
        client comes after it, and gives nothing as long as that is likely to give pages before its phase
        ends; then those that wait, who is last in the queue first. At the very end the claimant's own
        unneeded pages.

        Args:
            claims: in the order of their urgency.
            now: seconds.
            waiting: clients in the order in which they will run.
        """
        actions: list[Give | Take] = []
        short: list[int] = []
        turn = {client: len(waiting) - i for i, client in enumerate(waiting)}
        incoming = sum(a.taking for a in self.accounts.values())
        for claim in claims:
            account = self.accounts[claim.client]
            lacking = account.want - account.held
            if lacking <= 0:
                continue
            room = self._room(claim)
            give = min(lacking, max(self.free, 0), room)
            if give:
                account.held += give
                lacking -= give
                room -= give
                actions.append(Give(client=claim.client, count=give))
            if lacking > room:  # the job has all that it may have: its own processes give first
                over = lacking - room
                over -= min(over, sum(self.accounts[c].taking for c in claim.kin))
                for victim, count in self._victims(claim, over, now, turn, only=claim.kin):
                    self.accounts[victim].taking += count
                    lacking -= count
                    actions.append(Take(client=victim, count=count))
                lacking = min(lacking, room)
            coming = min(lacking, incoming)
            incoming -= coming
            lacking -= coming
            for victim, count in self._victims(claim, lacking, now, turn):
                self.accounts[victim].taking += count
                lacking -= count
                actions.append(Take(client=victim, count=count))
            if account.want > account.held and not coming and not self.taking:
                short.append(claim.client)
        return Plan(actions=actions, short=short)

    def _room(self, claim: Claim) -> int:
        """Pages that the claimant's job may have beside those that it has."""
        if claim.limit is None:
            return _ANY
        return max(0, claim.limit - sum(self.accounts[c].held for c in claim.kin))

    def _victims(
        self, claim: Claim, lacking: int, now: float, turn: dict[int, int], only: frozenset[int] | None = None
    ) -> Iterator[tuple[int, int]]:
        taken: dict[int, int] = {}

        def offers(clients: list[int]) -> Iterator[tuple[int, int]]:
            for kind in range(3):
                for client in clients:
                    strict = client in claim.running
                    yield client, self._offer(client, kind, taken.get(client, 0), strict=strict)

        def order(c: int) -> tuple[int, float, float, int]:
            if c in turn:
                return turn[c], 0.0, 0.0, c
            return 0, -self._back_at(c, now, running=c in claim.running), self.accounts[c].used_at, c

        clients = self.accounts.keys() if only is None else only
        others = [
            c
            for c in sorted(clients, key=order)
            if c != claim.client and c not in claim.spared and now >= self.accounts[c].unwilling_until
        ]
        rest = [c for c in others if c not in claim.last]
        horizon = min((now + (self.accounts[c].away or 0.0) for c in claim.holders), default=-inf)
        far = [c for c in rest if c not in turn and self._back_at(c, now, running=c in claim.running) >= horizon]
        near = [c for c in rest if c not in turn and c not in far]
        sources = (far, near, [c for c in rest if c in turn], [c for c in others if c in claim.last])
        for source in sources:
            if source is near:
                lacking -= self._promised(claim)
            for client, offer in offers(source):
                count = min(offer, lacking)
                if count > 0:
                    taken[client] = taken.get(client, 0) + count
                    lacking -= count
        own = self.accounts[claim.client]
        count = min(min(own.own, own.held) - own.taking, lacking)
        if count > 0 and now >= own.unwilling_until:
            taken[claim.client] = count
        yield from taken.items()

    def _promised(self, claim: Claim) -> int:
        """Pages that a running phase is likely to stop needing: its client did so in its lease before."""
        return sum(
            min(account.unneeded_before, account.held)
            for account in (self.accounts[c] for c in claim.holders)
            if account.unneeded < account.unneeded_before
        )

    def _back_at(self, client: int, now: float, *, running: bool) -> float:
        """When a client is expected to ask again; infinity where there is no telling."""
        account = self.accounts[client]
        if running:
            return now + (account.away or 0.0)
        if account.away is None or now - account.used_at > OVERDUE * account.away:
            return inf
        return account.used_at + account.away

    def _offer(self, client: int, kind: int, taken: int, *, strict: bool) -> int:
        """Pages of one kind that the client still has to give; kinds go in their order."""
        account = self.accounts[client]
        gone = account.taking + taken
        counts = account.counts
        # Pages given since the client last counted are taken for dirty.
        dirty = counts.dirty if strict else max(counts.dirty, account.held - counts.discardable - counts.clean)
        kinds = (counts.discardable, counts.clean, dirty)
        before = sum(kinds[:kind])
        left = before + kinds[kind] - max(gone, before)
        return max(0, min(left, kinds[kind], account.held - gone))
