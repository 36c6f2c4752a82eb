"""The pages of all devices: who may have how many, what a switch costs, and who cannot be served. Pure.

What it is not: it does not say who runs; the bank of each device says whose pages to take.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import inf

from pymux.bank import Account, Bank, Claim
from pymux.estimator import SwitchCost
from pymux.events import Acquire, Action, Deny, Give, Want
from pymux.lease import Lease, State
from pymux.members import NO_BUDGET, Client, Members

PATIENCE_SECONDS = 5.0  # how long a holder may lack pages that nobody can give, before it is told
STOPPED_SECONDS = 60.0  # the same, while a process that is stopped has pages: it may be back


class Pages:
    """The banks of a node.

    Args:
        banks: of the devices, by UUID; filled as devices become known.
        members: who is connected.
    """

    def __init__(self, banks: Mapping[str, Bank], members: Members) -> None:
        self.banks = banks
        self.costs: dict[str, SwitchCost] = {}
        self._members = members
        self._short: dict[int, float] = {}  # holders that nobody can give pages, since when

    def account(self, client: Client) -> Account:
        """What the bank knows of a client that has a device."""
        return self.banks[client.device].accounts[client.id]

    @property
    def short_devices(self) -> set[str]:
        """Devices with a holder that nobody can give pages."""
        return {self._members.clients[c].device for c in self._short}

    def is_back(self, client: Client, now: float) -> None:
        """Take it that a client gives again: who lacks pages on its device is patient from now on."""
        self.account(client).unwilling_until = 0.0
        for c in self._short:
            if self._members.clients[c].device == client.device:
                self._short[c] = now

    def note_want(self, client: Client, e: Acquire | Want, now: float | None) -> None:
        """Book what a client wants; `now` where it asks for the device anew."""
        if not client.device:
            return
        account = self.account(client)
        account.want, account.own, account.counts = e.want, e.own, e.counts
        client.want_seq = e.seq
        if now is not None:
            self.banks[client.device].asked(client.id, now)
            account.unwilling_until = 0.0

    def forget_want(self, client: Client) -> None:
        """The client waits for no pages any more."""
        self.settled(client)
        if client.device:
            self.account(client).want = 0

    def settled(self, client: Client) -> None:
        """Whatever the client lacked, it does not wait for it any more."""
        self._short.pop(client.id, None)

    def impossible(self, client: Client, e: Acquire | Want) -> Deny | None:
        """The answer to a client that wants more than it can ever have."""
        if not client.device or e.want - e.own <= self._most(client):
            return None
        return self._denial(client, for_good=True)

    def lacking(self, lease: Lease, device: str) -> int:
        """Pages that a lease's members on a device want and do not hold."""
        accounts = self.banks[device].accounts
        return sum(max(0, accounts[m].want - accounts[m].held) for m in lease.members if m in accounts)

    def cost(self, lease: Lease) -> float:
        """Seconds that it takes to make a waiting lease's pages resident, as expected."""
        return max((self.lacking(lease, d) * self.costs[d].per_page for d in lease.devices), default=0.0)

    def none_stopped(self, device: str) -> bool:
        """Whether no pages of a device are with somebody who does not answer."""
        return all(a.unwilling_until < inf for a in self.banks[device].accounts.values())

    def fits(self, lease: Lease, on: Mapping[str, Sequence[Lease]]) -> bool:
        """Whether a waiting lease's pages can be had beside those of who runs, without those of who is stopped."""
        for device in lease.devices:
            bank = self.banks[device]
            needed = sum(a.held for a in bank.accounts.values() if a.unwilling_until == inf)
            if not needed and not on[device]:
                continue
            for x in (*on[device], lease):
                for a in (bank.accounts[m] for m in x.members if m in bank.accounts):
                    spare = min(a.held, a.counts.discardable + a.counts.clean + a.counts.dirty)
                    needed += a.held - spare if x.running else a.want - a.own
            if needed > bank.budget:
                return False
        return True

    def plan(
        self, device: str, on: Sequence[Lease], heir: Lease | None, order: Sequence[Lease], now: float
    ) -> list[Action]:
        """Give free pages to those that need them, and take what they lack.

        Args:
            device: its UUID.
            on: what occupies it.
            heir: what is next there.
            order: what waits, or waited a moment ago, in the order in which it will run.
            now: seconds.
        """
        bank = self.banks[device]
        here = bank.accounts.keys()
        holders = [m for x in on for m in sorted(x.members & here)]
        next_up = sorted(heir.members & here) if heir else []
        if not any(bank.accounts[m].want > bank.accounts[m].held for m in (*holders, *next_up)):
            for m in holders:
                self._short.pop(m, None)
            return []
        spared = frozenset(holders)
        # What a running phase does not use is its heir's; until it runs, nobody knows.
        running = frozenset(m for x in on for m in x.members & x.ready if x.running)
        both = (spared - running) | frozenset(next_up)
        budgets = self._members.page_budgets(device)
        claims = [Claim(client=c, spared=spared, last=frozenset(next_up), **budgets.get(c, NO_BUDGET)) for c in holders]
        claims += [
            Claim(client=c, spared=both, running=running, holders=spared, **budgets.get(c, NO_BUDGET)) for c in next_up
        ]
        waiting = [m for x in order if x.state is State.WAITING for m in sorted(x.members & here)]
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
            if now - self._short.get(c, now) >= (PATIENCE_SECONDS if self.none_stopped(device) else STOPPED_SECONDS):
                del self._short[c]
                out.append(self._denial(self._members.clients[c], for_good=False))
        return out

    def _most(self, client: Client) -> int:
        """Pages that a client can have at best."""
        limit = self._members.page_limit(client)
        capacity = self.banks[client.device].capacity
        return capacity if limit is None else min(capacity, limit)

    def _denial(self, client: Client, *, for_good: bool) -> Deny:
        bank, account = self.banks[client.device], self.account(client)
        need, mib, job = account.want - account.own, bank.page_size / 2**20, client.job.name
        most = self._most(client)
        if for_good and most < bank.capacity:
            text = (
                f"job '{job}' needs {need * mib:.0f} MiB on the device at once, and may have {most * mib:.0f} MiB of "
                f"it. Use fewer regions in this phase (uses=...), or give the job more in the broker's configuration."
            )
        elif for_good:
            text = (
                f"job '{job}' needs {need * mib:.0f} MiB on the device at once, and the device has "
                f"{bank.capacity * mib:.0f} MiB for regions. Use fewer regions in this phase (uses=...), a smaller "
                f"model or batch, or a larger device."
            )
        else:
            text = (
                f"job '{job}' lacks {(account.want - account.held) * mib:.0f} of the {need * mib:.0f} MiB it needs. "
                f"The device has {bank.budget * mib:.0f} of {bank.capacity * mib:.0f} MiB for regions now, and no "
                f"other client can give pages: others outside pymux use the device, the host has no room "
                f"to swap out, or who has them is stopped. 'pymux status' shows who holds what."
            )
        account.want = 0
        error = "CapacityError" if for_good else "DeviceOutOfMemory"
        return Deny(client=client.id, seq=client.want_seq, need=need, budget=most, error=error, text=text)
