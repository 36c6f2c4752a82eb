"""The node's budget of pinned host memory: who may have how much. Pure.

Invariants: grants add up to the budget at most, unless clients of a broker that died brought more; a
grant never shrinks but by its client's own word; an urgent request is always answered, and refused only when all
others were asked for what they do not use; where the budget has room for it, everybody gets a first chunk, whatever
others have asked for before.
"""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass

from pymux.events import HostGrant, TrimHost

TRIM_SECONDS = 2.0  # how long who must be refused waits for what others give back
TRIM_AGAIN_SECONDS = 1.0  # within this, nobody is asked twice
HOST_CHUNK = 16  # pages that a client's store of swapped-out pages grows by: csrc/backing.h, kSlotsPerChunk


@dataclass(slots=True)
class HostAccount:
    """What one client has, in bytes."""

    granted: int = 0
    want: int = 0
    urgent: bool = False  # a swap-out waits for the answer
    job: str = ""
    limit: int = 0  # of all the job's clients; 0: none
    trimmed: float | None = None  # when it was last asked for what it does not use
    trimming: bool = False  # and has not answered
    first: int = 0  # the least that is of use: without it the client cannot give a page up


class HostBudget:
    """Counts the bytes of host memory that clients may pin.

    Args:
        budget: bytes for all clients of the node.
    """

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self.accounts: dict[int, HostAccount] = {}

    @property
    def free(self) -> int:
        """Bytes that nobody was granted; negative after a smaller budget took over."""
        return self.budget - sum(a.granted for a in self.accounts.values())

    def open(self, client: int, pinned: int, job: tuple[str, int] = ("", 0), first: int = 0) -> None:
        """Count a client in.

        Args:
            client: its id.
            pinned: bytes that it has pinned.
            job: its job, and the bytes that all clients of the job may have (0: any).
            first: bytes to keep for it until it asks.
        """
        self.accounts[client] = HostAccount(granted=pinned, want=pinned, job=job[0], limit=job[1], first=first)

    def close(self, client: int) -> None:
        """Count a client out; what it had is free."""
        del self.accounts[client]

    def ask(self, client: int, want: int, *, urgent: bool) -> None:
        """Note how many bytes a client wants in all; below its grant it gives the rest back."""
        account = self.accounts[client]
        account.want, account.urgent, account.trimming = want, urgent, False
        account.granted = min(account.granted, want)

    def _give(self, account: HostAccount) -> int:
        """Bytes of what the account wants and lacks that it can have."""
        room = self.free
        firsts = sum(a.first for a in self.accounts.values())
        if firsts <= self.budget:
            room -= sum(max(0, a.first - a.granted) for a in self.accounts.values() if a is not account)
            if firsts + account.first <= self.budget:  # who comes next finds some, if all here have theirs
                room = max(room - account.first, min(room, account.first - account.granted))
        if account.limit:
            room = min(room, account.limit - sum(a.granted for a in self.accounts.values() if a.job == account.job))
        return max(0, min(account.want - account.granted, room))

    def deadline(self) -> float | None:
        """When who waits for what others give back is to be answered; None: nobody does."""
        asked = [a.trimmed for a in self.accounts.values() if a.trimming and a.trimmed is not None]
        waits = any(a.urgent for a in self.accounts.values())
        return max(asked) + TRIM_SECONDS if asked and waits else None

    def _ask_others(self, client: int, now: float) -> list[TrimHost]:
        """Ask those who may have host memory that they do not use, and were not asked lately."""
        out = []
        me = self.accounts[client]
        kin = {c for c, a in self.accounts.items() if a.job == me.job}
        full = me.limit and sum(self.accounts[c].granted for c in kin) >= me.limit
        for c in sorted(kin if full else self.accounts):
            a = self.accounts[c]
            lately = a.trimmed is not None and now - a.trimmed < TRIM_AGAIN_SECONDS
            if c != client and a.granted and not a.urgent and not a.trimming and not lately:
                a.trimming, a.trimmed = True, now
                out.append(TrimHost(client=c))
        return out

    def plan(self, sharing: Container[int], now: float) -> list[HostGrant | TrimHost]:
        """Grant what there is.

        Args:
            now: seconds.
            sharing: clients whose device others use too. One that has its device alone swaps nothing, and
                gets only what it asks for urgently.
        """
        out: list[HostGrant | TrimHost] = []
        waiting = sorted(self.accounts.items(), key=lambda item: not item[1].urgent)
        for client, account in waiting:
            lacking = account.want - account.granted
            if lacking <= 0 and not account.urgent:
                continue
            give = self._give(account) if account.urgent or client in sharing else 0
            if account.urgent and give < lacking:
                out += self._ask_others(client, now)
                due = self.deadline()
                if due is not None and now < due:
                    continue
            if give or account.urgent:
                account.granted += give
                exhausted = account.urgent and give < lacking  # who only plans ahead is not told that it is over
                account.urgent = False
                out.append(HostGrant(client=client, granted=account.granted, exhausted=exhausted))
        return out
