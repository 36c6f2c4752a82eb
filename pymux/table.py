"""Where leases are: what waits for which device, and what occupies it. Pure.

Invariants: a waiting lease is listed at its group, and at each of its devices in the order of arrival; one that
occupies devices is listed at each of them, and a group has one such at most.
"""

from __future__ import annotations

from collections.abc import Iterable

from pymux.lease import GroupKey, Lease
from pymux.members import Group


class Table:
    """The leases of a node.

    Attributes:
        leases: those that occupy devices, are lent or fenced, by group.
        lent: of these, those that are lent.
        on: by device: what occupies it.
        waiting: by device: what waits for it.
        touched: devices to decide about.
    """

    def __init__(self) -> None:
        self.leases: dict[GroupKey, Lease] = {}
        self.lent: list[Lease] = []
        self.on: dict[str, list[Lease]] = {}
        self.waiting: dict[str, list[Lease]] = {}
        self._requests: dict[GroupKey, list[Lease]] = {}
        self.touched: set[str] = set()

    @property
    def queue(self) -> list[Lease]:
        """The requests that wait, in the order of arrival."""
        return sorted((x for requests in self._requests.values() for x in requests), key=lambda x: x.order)

    def add_device(self, device: str) -> None:
        """Make a device known."""
        self.on[device], self.waiting[device] = [], []

    def requests_of(self, key: GroupKey) -> list[Lease]:
        """What a group waits for."""
        return list(self._requests.get(key, ()))

    def enqueue(self, lease: Lease, group: Group) -> None:
        """List a request at the devices that its group has now."""
        self.dequeue(lease)
        on = {c.id: c.device for c in group.workers if not lease.ranks or c.rank in lease.ranks}
        lease.members = frozenset(on) | frozenset(lease.openers)
        lease.devices = frozenset(on.values())
        for device in lease.devices:
            at = self.waiting[device]
            at.append(lease)
            if len(at) > 1 and at[-2].order > lease.order:
                at.sort(key=lambda x: x.order)
        self.touched |= lease.devices
        self._requests.setdefault(lease.group, []).append(lease)

    def dequeue(self, lease: Lease) -> None:
        """Take a request out of the queue."""
        self._unlist(lease, self.waiting)
        requests = self._requests.get(lease.group, [])
        if lease in requests:
            requests.remove(lease)
            if not requests:
                del self._requests[lease.group]

    def occupy(self, lease: Lease) -> None:
        """Note that a lease has its devices."""
        for device in lease.devices:
            self.on[device].append(lease)

    def vacate(self, lease: Lease) -> None:
        """Note that it has them no more."""
        self._unlist(lease, self.on)

    def scope(self, seeds: Iterable[str]) -> set[str]:
        """Return the devices that a decision about these may concern: those that leases tie together."""
        found: set[str] = set()
        todo = [d for d in seeds if d in self.on]
        while todo:
            device = todo.pop()
            if device in found:
                continue
            found.add(device)
            for lease in (*self.waiting[device], *self.on[device]):
                if len(lease.devices) > 1:
                    todo += lease.devices - found
        return found

    def _unlist(self, lease: Lease, at: dict[str, list[Lease]]) -> None:
        for device in lease.devices:
            if lease in at[device]:
                at[device].remove(lease)
                self.touched.add(device)
