"""Which waiting lease gets its devices now, who is next where not, and whom they wait for. Pure.

Invariants: a device that is kept for a lease goes meanwhile only to phases that are expected to be over by then, or
not much later; who has waited longer than the policy's bound is not passed over; whoever allows overlap is beside
others only if all their pages fit.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from math import inf

from pymux.estimator import Durations
from pymux.lease import Lease, State
from pymux.members import Members
from pymux.pages import Pages
from pymux.policy import Candidate, Policy
from pymux.table import Table


@dataclass(slots=True)
class Decision:
    """How it stands with some devices, when all that could be granted is.

    Attributes:
        heirs: who is next, by device.
        order: what goes on waiting, most urgent first.
    """

    heirs: dict[str, Lease] = field(default_factory=dict)
    order: list[Lease] = field(default_factory=list)


class Dispatcher:
    """Decides by policy, pages and what is expected of phases."""

    def __init__(self, policy: Policy, table: Table, members: Members, pages: Pages, durations: Durations) -> None:
        self.policy = policy
        self._table = table
        self._members = members
        self._pages = pages
        self._durations = durations

    def order(self, leases: list[Lease], now: float) -> list[Lease]:
        """Return waiting leases, most urgent first; `leases` are in the order of arrival."""
        if self.policy.by_arrival:
            return sorted(leases, key=lambda x: x.arrived)
        if len(leases) < 2:
            return leases
        return [leases[i] for i in self.policy.order([self.candidate(x, now) for x in leases], now)]

    def candidate(self, lease: Lease, now: float) -> Candidate:
        """A lease as policies see it."""
        job = self._members.jobs[lease.group[0]]
        job.advance(now)
        waits = lease.state is State.WAITING
        return Candidate(
            arrived=lease.arrived,
            ran=0.0 if waits else max(now - lease.granted, 1e-9),
            remaining=max(0.0, (self._expected(lease) or 0.0) - self._done(lease, now)),
            cost=self._pages.cost(lease) if waits else 0.0,
            priority=self._priority(lease),
            weight=job.limits.weight,
            elapsed=job.elapsed,
            solo=job.elapsed - job.blocked,
        )

    def presses(self, running: Lease, heir: Lease, now: float) -> tuple[bool, float]:
        """Whether a running lease should give way to its heir at the next yield point.

        Returns:
            That; and if not, the seconds for which its group's phases may follow each other meanwhile.
        """
        waiting = self.candidate(heir, now)
        candidate = replace(self.candidate(running, now), cost=waiting.cost)
        if self.policy.yields(candidate, waiting, now):
            return True, 0.0
        following = replace(candidate, remaining=self._expected(running) or 0.0)
        return False, self.policy.extends(following, waiting, now)

    def together(self, a: Lease, b: Lease) -> bool:
        """Whether two leases may run beside each other: the less urgent one allows it."""
        pa, pb = self._priority(a), self._priority(b)
        return (a.overlap and pa > pb) or (b.overlap and pb > pa)

    def decide(self, scope: set[str], now: float, grant: Callable[[Lease], None]) -> Decision:
        """Go through what waits for these devices; each grant is carried out before the next lease is looked at."""
        table, d = self._table, Decision()
        found = {x.order: x for device in scope for x in table.waiting[device]}
        free_until: dict[str, float] = {}  # of devices that are kept for an heir that waits for others too
        order = self.order([found[k] for k in sorted(found)], now)
        sharing = any(x.overlap for x in order) or any(x.overlap for device in scope for x in table.on[device])
        for lease in order:
            if not sharing and len(d.heirs) == len(scope) and all(table.on[device] for device in scope):
                break  # everything is taken, and has its heir
            if lease.until > now or not self._members.groups[lease.group].ready or lease.group in table.leases:
                continue
            blockers = [x for device in lease.devices for x in table.on[device] if not self.together(x, lease)]
            claimed = [x for x in lease.devices if x in d.heirs and not self.together(d.heirs[x], lease)]
            beside = any(table.on[device] for device in lease.devices)
            if claimed and not beside and now + self._needs(lease) <= min(free_until[device] for device in claimed):
                claimed = []  # it is over before the heir can begin
            fits = not (claimed or blockers) and self._pages.fits(lease, table.on)
            if claimed or blockers or (beside and not fits):
                until = max((self._busy_until(x, now) for x in blockers), default=now)
                for device in lease.devices - d.heirs.keys():
                    d.heirs[device], free_until[device] = lease, until
            elif fits and not self._lent(lease, now):  # where it does not fit, the pages are with somebody stopped
                grant(lease)
        d.order = [x for x in order if x.state is State.WAITING]
        return d

    def _priority(self, lease: Lease) -> int:
        return lease.priority + self._members.jobs[lease.group[0]].limits.priority

    def _expected(self, lease: Lease) -> float | None:
        return lease.expected or self._durations.expect(lease.group[0], lease.phase)

    def _done(self, lease: Lease, now: float) -> float:
        return lease.ran + (now - lease.began if lease.began and lease.state is not State.WAITING else 0.0)

    def _needs(self, lease: Lease) -> float:
        """Seconds until a waiting lease would have given the device back, and its pages be back, as expected."""
        expected = self._expected(lease) or self._durations.typical
        return max(0.0, expected - lease.ran) + 2 * self._pages.cost(lease) if expected else inf

    def _busy_until(self, lease: Lease, now: float) -> float:
        """When a lease is expected to end; one that took longer than expected is taken to last as long again."""
        done = self._done(lease, now)
        left = (self._expected(lease) or 0.0) - done
        return now + (left if left > 0 else done)

    def _lent(self, lease: Lease, now: float) -> bool:
        """Whether a device is lent, and this phase would keep it from its lender for too long.

        It may if it is expected to be over when the lender is back; or if the lender then waits for less long than
        those who wait now would, all together, for a device that stands still.
        """
        loans = [x for x in self._table.lent if x.devices & lease.devices]
        if not loans or self.policy.overdue(self.candidate(lease, now), now):
            return False
        until = min(x.until for x in loans)
        waiting = max(len(self._table.waiting[device]) for device in lease.devices)
        return now + self._needs(lease) - until > waiting * (until - now)
