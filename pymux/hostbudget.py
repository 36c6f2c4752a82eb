"""The node's budget of pinned host memory: who may have how much. Pure.

Invariants: grants add up to the budget at most, unless clients of a broker that died brought more; a
grant never shrinks but by its client's own word; an urgent request is always answered.
"""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass

from pymux.events import HostGrant


@dataclass(slots=True)
class HostAccount:
    """What one client has, in bytes."""

    granted: int = 0
    want: int = 0
    urgent: bool = False  # a swap-out waits for the answer
    job: str = ""
    limit: int = 0  # of all the job's clients; 0: none


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

    def open(self, client: int, pinned: int, job: tuple[str, int] = ("", 0)) -> None:
        """Count a client in, with what it has pinned, its job, and the bytes that its job may have (0: any)."""
        self.accounts[client] = HostAccount(granted=pinned, want=pinned, job=job[0], limit=job[1])

    def close(self, client: int) -> None:
        """Count a client out; what it had is free."""
        del self.accounts[client]

    def ask(self, client: int, want: int, *, urgent: bool) -> None:
        """Note how many bytes a client wants in all; below its grant it gives the rest back."""
        account = self.accounts[client]
        account.want, account.urgent = want, urgent
        account.granted = min(account.granted, want)

    def _room(self, account: HostAccount) -> int:
        if not account.limit:
            return self.free
        return min(self.free, account.limit - sum(a.granted for a in self.accounts.values() if a.job == account.job))

    def plan(self, sharing: Container[int]) -> list[HostGrant]:
        """Grant what there is.

        Args:
            sharing: clients whose device others use too. One that has its device alone swaps nothing, and
                gets only what it asks for urgently.
        """
        out: list[HostGrant] = []
        waiting = sorted(self.accounts.items(), key=lambda item: not item[1].urgent)
        for client, account in waiting:
            lacking = account.want - account.granted
            if lacking <= 0 and not account.urgent:
                continue
            give = max(0, min(lacking, self._room(account))) if account.urgent or client in sharing else 0
            if give or account.urgent:
                account.granted += give
                account.urgent = False
                out.append(HostGrant(client=client, granted=account.granted, exhausted=give < lacking))
        return out
