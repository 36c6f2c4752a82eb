"""Writes docs/lease.md, the states of a lease, from the transition table: python tests/make_lease_page.py PATH."""

import sys
from pathlib import Path

from pymux.lease import State, diagram

WHAT = {
    State.WAITING: "in the queue; the next one gets pages already",
    State.GRANTED: "the devices are the group's; its members make their regions resident",
    State.ACTIVE: "all members have acknowledged: the body runs, or the lease is parked because nobody waits",
    State.RECALLED: "the same, and somebody waits: it comes back at the end of the phase, or at once if it is parked",
    State.PRESSED: "the same, and it comes back at the next yield point",
    State.DRAINING: "the phase is over; the members wait for their devices",
    State.LENDING: "the same, and the group will be back in a moment",
    State.UNDOING: "a member could not follow: the others give back what they took, and the request waits again",
    State.LENT: "others may run whose phases are expected to be over when the group is back",
    State.FENCED: "a member was silent for too long: whatever it does, the devices are others'",
    State.ENDED: "its generation is never given again",
}

rows = "\n".join(f"| {s.value} | {text} |" for s, text in WHAT.items())
page = f"""# The life of a lease

Made by `make docs` from the table in `pymux/lease.py`; the scheduler moves leases by that table alone, and what is
not in it is an error there.

```mermaid
{diagram()}```

| state | meaning |
| --- | --- |
{rows}

A lease of one process goes through *draining* at once: its agent has waited for the device before it says so. In
a group, *granted* lasts until every member has acknowledged, and *draining* until every member's device is done.
"""
Path(sys.argv[1]).write_text(page)
