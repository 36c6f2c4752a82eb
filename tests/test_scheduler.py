"""Who runs and who gives pages, without any I/O: events in, actions out."""

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from pymux.bank import RETRY_SECONDS
from pymux.errors import CapacityError, ClientExists, DriverError, HostOutOfMemory, ProtocolError
from pymux.events import (
    Acquire,
    Budget,
    Cancel,
    Counts,
    Deny,
    Fenced,
    Give,
    Grant,
    HostGrant,
    HostWant,
    Joined,
    Left,
    Ping,
    Pong,
    Promise,
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
from pymux.hostbudget import TRIM_SECONDS
from pymux.jobs import Limits
from pymux.pages import PATIENCE_SECONDS
from pymux.policy import fifo
from pymux.scheduler import Scheduler

DEV = "GPU-0"


def scheduler(budget=10, devices=(DEV,), **kw):
    s = Scheduler(fifo(60.0), host_budget=kw.pop("host_budget", 1 << 40), **kw)
    for d in devices:
        s.add_device(d, 1 << 20, budget, budget)
    return s


def joined(client, **kw):
    fields = {"job": f"job{client}", "name": "main", "group": "main", "device": DEV, "page_size": 1 << 20}
    return Joined(client=client, **{**fields, **kw})


def acquire(client, want, seq=1, **kw):
    return Acquire(client=client, seq=seq, phase="train", want=want, **kw)


def all_dirty(n):
    return Counts(resident=n, dirty=n)


def of(kind, actions):
    return [a for a in actions if isinstance(a, kind)]


def running(s, client, pages, now=0.0, seq=1):
    """Bring a client to hold a lease with its pages."""
    actions = s.handle(acquire(client, pages, seq=seq), now)
    generation = of(Grant, actions)[0].generation
    s.handle(Ready(client=client, generation=generation), now)
    return generation


def test_a_free_device_is_granted_with_its_pages_at_once():
    s = scheduler()
    s.handle(joined(1), 0)
    assert s.handle(acquire(1, 4), 0) == [Grant(client=1, seq=1, generation=1), Give(client=1, count=4)]


def test_a_second_client_waits_and_the_holder_is_recalled_once():
    s = scheduler()
    s.handle(joined(1), 0)
    s.handle(joined(2), 0)
    g = running(s, 1, 4)
    assert of(Recall, s.handle(acquire(2, 3), 0)) == [Recall(client=1, generation=g, press=True)]
    assert of(Recall, s.handle(Tick(), 1)) == []


def test_the_next_in_the_queue_gets_free_pages_while_the_holder_still_runs():
    s = scheduler(budget=10)
    s.handle(joined(1), 0)
    s.handle(joined(2), 0)
    running(s, 1, 6)
    assert of(Give, s.handle(acquire(2, 3), 0)) == [Give(client=2, count=3)]


def test_nothing_is_taken_from_the_holder_while_it_runs():
    s = scheduler(budget=10)
    s.handle(joined(1), 0)
    s.handle(joined(2), 0)
    g = running(s, 1, 8)
    actions = s.handle(acquire(2, 6), 0)
    assert of(Give, actions) == [Give(client=2, count=2)]
    assert of(Take, actions) == []
    actions = s.handle(Release(client=1, generation=g, counts=all_dirty(8)), 1)
    assert of(Take, actions) == [Take(client=1, count=4)]


def test_only_what_the_next_lacks_is_taken():
    s = scheduler(budget=10)
    for c in (1, 2, 3):
        s.handle(joined(c), 0)
    s.handle(Release(client=1, generation=running(s, 1, 5), counts=all_dirty(5)), 1)
    s.handle(Release(client=2, generation=running(s, 2, 5), counts=all_dirty(5)), 2)
    actions = s.handle(acquire(3, 3), 3)
    assert of(Take, actions) == [Take(client=1, count=3)], "of the client that has not run for longest"


def turn(s, client, pages, begin, end, counts=None):
    """One whole lease."""
    g = of(Grant, s.handle(acquire(client, pages), begin))[0].generation
    s.handle(Ready(client=client, generation=g), begin)
    s.handle(Release(client=client, generation=g, counts=counts or all_dirty(pages)), end)


def test_of_jobs_that_take_turns_the_one_that_is_back_last_gives_its_pages():
    s = scheduler(budget=10)
    for c in (1, 2, 3):
        s.handle(joined(c), 0)
    for t in (0, 10, 20):  # 1 and 2 are away for 9 seconds each time
        turn(s, 1, 5, t + 0.5, t + 1)
        turn(s, 2, 5, t + 1.5, t + 2)
    actions = s.handle(acquire(3, 3), 22.5)
    assert of(Take, actions) == [Take(client=2, count=3)], "client 1 is expected back before"


def test_a_job_that_is_away_for_much_longer_than_usual_gives_its_pages_first():
    s = scheduler(budget=10)
    for c in (1, 2, 3):
        s.handle(joined(c), 0)
    for t in (0, 10, 20):
        turn(s, 1, 5, t + 0.5, t + 1)
    for t in (0, 10, 20, 30, 40, 50, 60):
        turn(s, 2, 5, t + 1.5, t + 2)
    assert of(Take, s.handle(acquire(3, 3), 62.5)) == [Take(client=1, count=3)]


def test_what_a_running_phase_does_not_use_is_its_heirs_and_no_more():
    s = scheduler(budget=10)
    s.handle(joined(1), 0)
    s.handle(joined(2), 0)
    g = of(Grant, s.handle(acquire(1, 8), 0))[0].generation
    assert of(Take, s.handle(acquire(2, 9), 0)) == [], "not before it runs"
    ready = Ready(client=1, generation=g, counts=Counts(resident=8, clean=2, dirty=1))
    assert of(Take, s.handle(ready, 1)) == [Take(client=1, count=3)]
    s.handle(Returned(client=1, count=3, counts=Counts(resident=5)), 2)
    assert of(Take, s.handle(Tick(), 3)) == []


def test_nothing_is_taken_from_who_runs_sooner_while_the_running_phase_is_likely_to_give():
    s = scheduler(budget=10)
    for c in (1, 2, 3):
        s.handle(joined(c), 0)
    idle = Counts(resident=4, dirty=2)
    turn(s, 3, 4, 0.1, 0.5)
    for t in (0, 10):  # 1 trains with four pages, then needs only two of them
        g = of(Grant, s.handle(acquire(1, 4), t + 1))[0].generation
        s.handle(Ready(client=1, generation=g), t + 1)
        s.handle(Ready(client=1, generation=g, counts=idle), t + 2)
        s.handle(Release(client=1, generation=g, counts=all_dirty(4)), t + 3)
        turn(s, 3, 4, t + 4, t + 5)
    g = of(Grant, s.handle(acquire(1, 4), 21))[0].generation
    actions = s.handle(Ready(client=1, generation=g), 21) + s.handle(acquire(2, 4), 21.5)
    assert of(Take, actions) == [], "client 3 is back before client 1 is"
    assert of(Take, s.handle(Ready(client=1, generation=g, counts=idle), 22)) == [Take(client=1, count=2)]


def test_a_phase_that_runs_still_gets_pages_for_its_lazy_regions():
    s = scheduler(budget=10)
    s.handle(joined(1), 0)
    s.handle(joined(2), 0)
    turn(s, 2, 8, 0, 1)
    g = of(Grant, s.handle(acquire(1, 2), 2))[0].generation
    actions = s.handle(Ready(client=1, generation=g, want=6), 2)
    assert of(Take, actions) == [Take(client=2, count=4)]
    assert of(Give, s.handle(Returned(client=2, count=4), 3)) == [Give(client=1, count=4)]


def test_of_those_that_wait_the_last_in_the_queue_gives_first():
    s = scheduler(budget=12)
    for c in (1, 2, 3, 4):
        s.handle(joined(c), 0)
    for c in (2, 3, 4):
        turn(s, c, 4, c, c + 0.5)
    actions = [a for c in (1, 2, 3, 4) for a in s.handle(acquire(c, 4), 10 + c)]
    takes = {}
    for a in of(Take, actions):
        takes[a.client] = takes.get(a.client, 0) + a.count
    assert takes == {2: 4}, "when client 1 asked nobody waited"
    actions = s.handle(Returned(client=2, count=4, want=4), 15)  # 2 is next, and lacks 4
    assert of(Take, actions) == [Take(client=4, count=4)]


# ---- host memory ------------------------------------------------------------------------------


def host(client, want, **kw):
    return HostWant(client=client, want=want, **kw)


def answered(s, actions, now):
    """The actions, and those that follow when all who are asked for host memory need what they have."""
    for a in of(TrimHost, actions):
        actions = actions + s.handle(host(a.client, s.host.accounts[a.client].granted), now)
    return actions


def test_a_client_alone_on_its_device_gets_host_memory_only_when_a_swap_waits_for_it():
    s = scheduler(host_budget=100)
    s.handle(joined(1), 0)
    assert s.handle(host(1, 30), 0) == []
    assert s.handle(host(1, 40, urgent=True), 0) == [HostGrant(client=1, granted=40)]
    assert s.handle(host(1, 60), 0) == []
    assert of(HostGrant, s.handle(joined(2), 1)) == [HostGrant(client=1, granted=60)], "now it shares"


def test_the_host_budget_is_not_exceeded_and_an_urgent_request_is_always_answered():
    s = scheduler(host_budget=100)
    s.handle(joined(1), 0)
    s.handle(joined(2), 0)
    assert s.handle(host(1, 80), 0) == [HostGrant(client=1, granted=80)]
    assert s.handle(host(2, 50, urgent=True), 0) == [TrimHost(client=1)], "who has it is asked first"
    assert s.handle(host(1, 80), 0) == [HostGrant(client=2, granted=20, exhausted=True)], "and needs it all"
    assert s.handle(host(2, 50, urgent=True), 0) == [HostGrant(client=2, granted=20, exhausted=True)]
    assert s.host.free == 0


def test_host_memory_that_its_holder_does_not_use_goes_to_who_needs_it():
    s = scheduler(host_budget=100)
    for c in (1, 2, 3):
        s.handle(joined(c), 0)
    s.handle(host(1, 60), 0)
    s.handle(host(3, 40), 0)
    assert of(TrimHost, s.handle(host(2, 50, urgent=True), 1)) == [TrimHost(client=1), TrimHost(client=3)]
    assert of(HostGrant, s.handle(host(3, 40), 1)) == [], "the other has not answered"
    assert of(HostGrant, s.handle(host(1, 5), 1)) == [HostGrant(client=2, granted=50)]


def test_who_does_not_answer_keeps_host_memory_from_others_for_no_longer_than_is_said():
    s = scheduler(host_budget=100)
    for c in (1, 2):
        s.handle(joined(c), 0)
    s.handle(host(1, 80), 0)
    assert s.handle(host(2, 50, urgent=True), 1) == [TrimHost(client=1)]
    assert s.next_deadline(1) == 1 + TRIM_SECONDS
    assert of(HostGrant, s.handle(Tick(), 1 + TRIM_SECONDS)) == [HostGrant(client=2, granted=20, exhausted=True)]
    assert of(HostGrant, s.handle(host(2, 50, urgent=True), 9)) == [HostGrant(client=2, granted=20, exhausted=True)]


def test_only_a_jobs_own_processes_are_asked_when_the_jobs_limit_is_what_is_used_up():
    s = scheduler(host_budget=100, limits={"j": Limits(host_bytes=50)})
    for c, job in ((1, "j"), (2, "j"), (3, "other")):
        s.handle(joined(c, job=job, name=f"p{c}", group=f"p{c}"), 0)
    s.handle(host(1, 50), 0)
    s.handle(host(3, 10), 0)
    assert s.handle(host(2, 20, urgent=True), 1) == [TrimHost(client=1)]


def test_a_first_chunk_of_host_memory_is_kept_for_everybody_and_for_who_comes_next():
    chunk = 16 << 20
    s = scheduler(host_budget=5 * chunk)
    s.handle(joined(1), 0)
    s.handle(joined(2), 0)
    assert of(HostGrant, s.handle(host(1, 9 * chunk), 0)) == [HostGrant(client=1, granted=3 * chunk)]
    s.handle(joined(3), 1)
    for client in (2, 3):
        wanted = answered(s, s.handle(host(client, 2 * chunk, urgent=True), 1), 1)
        assert of(HostGrant, wanted) == [HostGrant(client=client, granted=chunk, exhausted=True)]
    assert s.host.free == 0
    s.handle(joined(4), 2)
    s.handle(Left(client=2), 3)
    assert of(HostGrant, answered(s, s.handle(host(3, 2 * chunk, urgent=True), 3), 3)) == [
        HostGrant(client=3, granted=chunk, exhausted=True)
    ], "it is for the fourth"


def test_what_a_client_gives_back_or_leaves_is_granted_to_others():
    s = scheduler(host_budget=100)
    for c in (1, 2, 3):
        s.handle(joined(c), 0)
    s.handle(host(1, 60), 0)
    s.handle(host(2, 80), 0)
    assert s.handle(host(1, 30), 1) == [HostGrant(client=2, granted=70)]
    assert of(HostGrant, s.handle(Left(client=1), 2)) == [HostGrant(client=2, granted=80)]


def test_a_client_that_comes_back_brings_what_it_has_pinned():
    s = scheduler(host_budget=100, frozen_until=1)
    s.handle(joined(1, host_pinned=70), 0)
    s.handle(joined(2, host_pinned=50), 0)
    assert s.host.free == -20
    assert s.handle(host(2, 60, urgent=True), 0) == [], "nothing is granted before all are back"
    answers = answered(s, s.handle(Tick(), 2), 2)
    assert of(HostGrant, answers) == [HostGrant(client=2, granted=50, exhausted=True)]


def test_discardable_goes_before_clean_before_dirty():
    s = scheduler(budget=9)
    for c in (1, 2, 3):
        s.handle(joined(c), 0)
    s.handle(Release(client=1, generation=running(s, 1, 5), counts=Counts(resident=5, clean=2, dirty=3)), 1)
    s.handle(Release(client=2, generation=running(s, 2, 4), counts=Counts(resident=4, discardable=2, dirty=2)), 2)
    takes = {a.client: a.count for a in of(Take, s.handle(acquire(3, 5), 3))}
    assert takes == {1: 3, 2: 2}, "2 discardable of client 2, 2 clean and 1 dirty of client 1"


def test_returned_pages_go_to_the_one_who_waits():
    s = scheduler(budget=4)
    s.handle(joined(1), 0)
    s.handle(joined(2), 0)
    s.handle(Release(client=1, generation=running(s, 1, 4), counts=all_dirty(4)), 1)
    s.handle(acquire(2, 3), 2)
    assert s.handle(Returned(client=1, count=1, counts=all_dirty(3)), 3) == [Give(client=2, count=1)]
    assert s.handle(Returned(client=1, count=2, counts=all_dirty(1)), 3) == [Give(client=2, count=2)]


def test_a_request_that_can_never_fit_is_denied_at_once_with_both_figures():
    s = scheduler(budget=4)
    s.handle(joined(1), 0)
    (deny,) = s.handle(acquire(1, 5), 0)
    assert isinstance(deny, Deny)
    assert (deny.need, deny.budget, deny.error) == (5, 4, "CapacityError")
    assert "5 MiB" in deny.text
    assert "4 MiB" in deny.text


def test_pages_of_regions_that_the_phase_does_not_use_are_its_own_to_give():
    s = scheduler(budget=6)
    s.handle(joined(1), 0)
    s.handle(Release(client=1, generation=running(s, 1, 5), counts=all_dirty(5)), 1)
    actions = s.handle(acquire(1, 8, seq=2, own=3, counts=all_dirty(5)), 2)
    assert of(Take, actions) == [Take(client=1, count=2)]


def test_growth_inside_a_phase_may_take_back_what_the_next_one_prefetched():
    s = scheduler(budget=10)
    s.handle(joined(1), 0)
    s.handle(joined(2), 0)
    running(s, 1, 6)
    s.handle(acquire(2, 4), 0)
    actions = s.handle(Want(client=1, seq=2, want=8), 1)
    assert of(Take, actions) == [Take(client=2, count=2)]


def test_growth_that_nobody_can_serve_is_denied_instead_of_hanging():
    s = scheduler(budget=10)
    s.handle(joined(1), 0)
    s.handle(joined(2), 0)
    s.handle(Release(client=2, generation=running(s, 2, 4), counts=all_dirty(4)), 0)
    running(s, 1, 6)
    assert of(Take, s.handle(Want(client=1, seq=2, want=8), 1)) == [Take(client=2, count=2)]
    assert s.handle(Returned(client=2, count=0, missing=2, counts=all_dirty(4)), 2) == []
    assert s.next_deadline(2) == 2 + RETRY_SECONDS
    assert of(Take, s.handle(Tick(), 2 + RETRY_SECONDS)) == [Take(client=2, count=2)], "asked again"
    assert s.handle(Returned(client=2, count=0, missing=2, counts=all_dirty(4)), 3) == []
    assert of(Deny, s.handle(Tick(), 4)) == [], "asked a third time, and silent"
    denials = of(Deny, s.handle(Tick(), 2 + PATIENCE_SECONDS))
    assert [(d.client, d.seq, d.error) for d in denials] == [(1, 2, "DeviceOutOfMemory")]
    s.handle(Returned(client=2, count=0, missing=2, counts=all_dirty(4)), 8)
    assert s.next_deadline(9) is None


def test_a_dead_clients_lease_and_pages_go_to_the_next():
    s = scheduler(budget=4)
    s.handle(joined(1), 0)
    s.handle(joined(2), 0)
    running(s, 1, 4)
    s.handle(acquire(2, 4), 0)
    actions = s.handle(Left(client=1), 1)
    assert [(a.client, a.seq) for a in of(Grant, actions)] == [(2, 1)]
    assert of(Give, actions) == [Give(client=2, count=4)]


def test_a_late_release_of_an_older_lease_changes_nothing():
    s = scheduler()
    s.handle(joined(1), 0)
    s.handle(joined(2), 0)
    old = running(s, 1, 2)
    s.handle(Release(client=1, generation=old), 1)
    new = running(s, 1, 2, seq=2)
    assert s.handle(Release(client=1, generation=old), 2) == []
    assert s.table.leases["job1", "main"].generation == new


def test_a_cancelled_request_is_forgotten():
    s = scheduler()
    s.handle(joined(1), 0)
    s.handle(joined(2), 0)
    g = running(s, 1, 2)
    s.handle(acquire(2, 2), 0)
    s.handle(Cancel(client=2, seq=1), 1)
    assert of(Grant, s.handle(Release(client=1, generation=g), 2)) == []


def test_two_clients_of_one_name_are_told_apart_by_an_error():
    s = scheduler()
    s.handle(joined(1, job="a"), 0)
    with pytest.raises(ClientExists, match="name"):
        s.handle(joined(2, job="a"), 0)


def test_page_sizes_of_a_device_do_not_mix():
    s = scheduler()
    with pytest.raises(DriverError, match="PYMUX_PAGE_SIZE"):
        s.handle(joined(1, page_size=4096), 0)


def test_asking_twice_is_a_protocol_error_of_the_one_who_did():
    s = scheduler()
    s.handle(joined(1), 0)
    running(s, 1, 2)
    with pytest.raises(ProtocolError):
        s.handle(acquire(1, 2, seq=2), 1)
    assert s.table.leases["job1", "main"].generation == 1


def test_a_request_that_is_repeated_while_it_waits_is_one_request():
    s = scheduler()
    for c in (1, 2):
        s.handle(joined(c), 0)
    g = running(s, 1, 2)
    s.handle(acquire(2, 2, seq=4), 0)
    s.handle(acquire(2, 2, seq=5), 0)
    grants = of(Grant, s.handle(Release(client=1, generation=g), 1))
    assert [(a.client, a.seq) for a in grants] == [(2, 5)]
    assert s.table.queue == []


def test_a_group_is_granted_when_all_members_are_there_and_on_all_their_devices():
    s = scheduler(devices=("A", "B"))
    s.handle(joined(1, job="j", name="r0", group="g", joint=True, world=2, rank=0, device="A"), 0)
    assert s.handle(acquire(1, 2), 0) == []
    s.handle(joined(3, job="k", device="B"), 0)
    g = running(s, 3, 2)
    late = joined(2, job="j", name="r1", group="g", joint=True, world=2, rank=1, device="B")
    assert of(Grant, s.handle(late, 1)) == [], "B is still held"
    s.handle(Cancel(client=1, seq=1), 1)
    s.handle(acquire(1, 2, seq=2), 1)
    grants = of(Grant, s.handle(Release(client=3, generation=g), 2))
    assert [(a.client, a.seq) for a in grants] == [(1, 2), (2, 0)]


def test_a_new_broker_grants_nothing_until_the_old_ones_clients_had_time_to_report():
    s = scheduler(frozen_until=5.0)
    s.handle(joined(1), 0)
    assert s.handle(acquire(1, 2), 0) == []
    s.handle(joined(2, held=3, lease_generation=7), 1)
    assert s.next_deadline(1) == 5.0
    actions = s.handle(Tick(), 5.0)
    assert of(Grant, actions) == [], "client 2 came back with its lease"
    assert of(Recall, actions) == [Recall(client=2, generation=7, press=True)]
    assert of(Grant, s.handle(Release(client=2, generation=7), 6))[0].generation > 7


def test_a_shrunken_budget_stops_gifts():
    s = scheduler(budget=10)
    s.handle(joined(1), 0)
    s.handle(Budget(device=DEV, pages=3), 0)
    actions = s.handle(acquire(1, 5), 0)
    assert of(Give, actions) == [Give(client=1, count=3)]
    assert of(Deny, actions) == [], "others may be gone in a moment"
    assert of(Give, s.handle(Budget(device=DEV, pages=10), 1)) == [Give(client=1, count=2)]


def test_a_budget_that_stays_too_small_is_told_with_the_figures():
    s = scheduler(budget=10)
    s.handle(joined(1), 0)
    s.handle(Budget(device=DEV, pages=3), 0)
    s.handle(acquire(1, 5), 0)
    (deny,) = of(Deny, s.handle(Tick(), PATIENCE_SECONDS))
    assert "3 of 10 MiB" in deny.text
    assert deny.error == "DeviceOutOfMemory"


class Sharing(RuleBasedStateMachine):
    """Clients that behave, die and answer late, against the promises."""

    BUDGET = 6
    HOST = 20

    @initialize()
    def start(self):
        self.s = scheduler(budget=self.BUDGET, host_budget=self.HOST)
        self.now = 0.0
        self.next = 1
        self.seq = 0
        self.held = {}
        self.asked = {}
        self.leases = {}
        self.waiting = {}
        self.active = set()

    def do(self, event):
        self.now += 1
        for a in self.s.handle(event, self.now):
            if a.client not in self.held:
                continue
            match a:
                case Give(count=n):
                    self.held[a.client] += n
                case Take(count=n):
                    self.asked[a.client] += n
                case Grant(generation=g):
                    self.leases[a.client] = g
                case TrimHost():
                    self.do(host(a.client, self.s.host.accounts[a.client].granted // 2))
                case Deny():
                    self.waiting.pop(a.client, None)
                    if a.client in self.leases:
                        self.release(a.client)

    def release(self, c):
        self.active.discard(c)
        self.do(Release(client=c, generation=self.leases.pop(c), counts=all_dirty(self.held[c])))

    @precondition(lambda self: len(self.held) < 3)
    @rule()
    def join(self):
        c, self.next = self.next, self.next + 1
        self.held[c] = self.asked[c] = 0
        self.do(joined(c))

    @rule(data=st.data(), want=st.integers(1, 6))
    def ask(self, data, want):
        idle = [c for c in self.held if c not in self.leases and c not in self.waiting]
        if idle:
            c = data.draw(st.sampled_from(sorted(idle)))
            self.seq += 1
            self.waiting[c] = max(want, self.held[c])
            self.do(acquire(c, self.waiting[c], seq=self.seq, counts=all_dirty(self.held[c])))

    @rule(data=st.data())
    def finish(self, data):
        for c in sorted(self.leases):
            if c in self.waiting and self.held[c] >= self.waiting[c]:
                del self.waiting[c]
                self.active.add(c)
                self.do(Ready(client=c, generation=self.leases[c]))
        if self.active and data.draw(st.booleans()):
            self.release(min(self.active))

    @rule(data=st.data())
    def give_back(self, data):
        owing = [c for c in self.held if self.asked[c] > 0]
        if owing:
            c = data.draw(st.sampled_from(sorted(owing)))
            n = min(data.draw(st.integers(1, self.asked[c])), self.held[c])
            self.asked[c] -= n
            self.held[c] -= n
            self.do(Returned(client=c, count=n, want=self.waiting.get(c, 0), counts=all_dirty(self.held[c])))

    @rule(data=st.data(), want=st.integers(0, 15), urgent=st.booleans())
    def want_host_memory(self, data, want, urgent):
        if self.held:
            self.do(HostWant(client=data.draw(st.sampled_from(sorted(self.held))), want=want, urgent=urgent))

    @invariant()
    def host_grants_never_exceed_the_budget_and_nobody_waits_without_an_answer(self):
        if hasattr(self, "s"):
            assert 0 <= self.s.host.free <= self.HOST
            assert not any(a.urgent for a in self.s.host.accounts.values())

    @rule(data=st.data())
    def die(self, data):
        if self.held:
            c = data.draw(st.sampled_from(sorted(self.held)))
            for state in (self.held, self.asked, self.leases, self.waiting):
                state.pop(c, None)
            self.active.discard(c)
            self.do(Left(client=c))

    @rule(data=st.data(), generation=st.integers(0, 3))
    def speak_late(self, data, generation):
        dead = data.draw(st.integers(1, self.next))
        if dead not in self.held:
            self.do(Release(client=dead, generation=generation))
            self.do(Returned(client=dead, count=1))

    @invariant()
    def one_lease_a_device(self):
        if hasattr(self, "s"):
            assert len(self.s.table.leases) <= 1
            assert len(self.leases) <= 1

    @invariant()
    def pages_never_exceed_the_budget(self):
        if hasattr(self, "s"):
            assert sum(self.held.values()) <= self.BUDGET
            bank = self.s.banks[DEV]
            assert bank.free >= 0
            assert {c: a.held for c, a in bank.accounts.items()} == self.held

    @invariant()
    def a_free_device_with_waiters_is_granted(self):
        if hasattr(self, "s") and self.s.table.queue:
            assert self.s.table.leases

    @invariant()
    def a_holder_that_lacks_pages_has_some_on_the_way(self):
        if hasattr(self, "s"):
            for c in self.leases:
                if c in self.waiting and self.held[c] < self.waiting[c]:
                    assert any(self.asked.values()), "nobody was asked, and nothing can come"


TestSharing = Sharing.TestCase


# ---- loans, urgency, silence, budgets -----------------------------------------------------------


def learnt(s, job, seconds):
    s.durations.learn(job, "train", 1, seconds)


def waiting(s, *clients, now=0.0):
    """Have clients wait, in this order."""
    return [a for c in clients for a in s.handle(acquire(c, 1), now)]


def test_a_lent_device_goes_to_a_phase_that_is_over_in_time():
    s = scheduler()
    for c in (1, 2, 3):
        s.handle(joined(c), 0)
    learnt(s, "job2", 60.0)
    learnt(s, "job3", 2.0)
    g = running(s, 1, 2)
    waiting(s, 2, 3)
    grants = of(Grant, s.handle(Release(client=1, generation=g, back=5.0), 1))
    assert [a.client for a in grants] == [3], "two seconds fit into five, sixty do not"
    g3 = grants[0].generation
    s.handle(Ready(client=3, generation=g3), 1)
    s.handle(acquire(1, 2, seq=2), 6)
    grants = of(Grant, s.handle(Release(client=3, generation=g3), 6.5))
    assert [a.client for a in grants] == [1], "the lender comes before who has waited for longer"


def test_a_loan_lapses_when_its_lender_is_late():
    s = scheduler()
    for c in (1, 2):
        s.handle(joined(c), 0)
    g = running(s, 1, 2)
    waiting(s, 2)
    assert of(Grant, s.handle(Release(client=1, generation=g, back=5.0), 1)) == [], "of an unknown length"
    assert s.next_deadline(1) is not None
    assert of(Grant, s.handle(Tick(), 5)) == []
    assert [a.client for a in of(Grant, s.handle(Tick(), 7))] == [2]
    assert of(Grant, s.handle(acquire(1, 2, seq=2), 8)) == [], "in its turn, like others"


def test_who_has_waited_beyond_the_bound_is_not_kept_from_a_lent_device():
    s = scheduler()
    for c in (1, 2):
        s.handle(joined(c), 0)
    g = running(s, 1, 2)
    waiting(s, 2)
    assert [a.client for a in of(Grant, s.handle(Release(client=1, generation=g, back=500.0), 61))] == [2]


def test_a_phase_that_allows_it_runs_beside_a_more_urgent_one_when_both_fit():
    s = scheduler(budget=10)
    for c in (1, 2, 3):
        s.handle(joined(c), 0)
    running(s, 1, 6)
    beside = s.handle(acquire(2, 4, overlap=True, priority=1), 1)
    assert [a.client for a in of(Grant, beside)] == [2]
    assert of(Give, beside) == [Give(client=2, count=4)]
    assert of(Grant, s.handle(acquire(3, 1, priority=1), 2)) == [], "it does not allow it"


def test_a_more_urgent_phase_need_not_wait_for_one_that_allows_overlap():
    s = scheduler(budget=10)
    for c in (1, 2):
        s.handle(joined(c), 0)
    g = of(Grant, s.handle(acquire(1, 6, overlap=True, priority=1), 0))[0].generation
    s.handle(Ready(client=1, generation=g), 0)
    assert [a.client for a in of(Grant, s.handle(acquire(2, 4), 1))] == [2]


@pytest.mark.parametrize(("pages", "priority"), [(5, 1), (4, 0)], ids=["too large", "not less urgent"])
def test_overlap_is_refused_where_it_would_hurt(pages, priority):
    s = scheduler(budget=10)
    for c in (1, 2):
        s.handle(joined(c), 0)
    running(s, 1, 6)
    assert of(Grant, s.handle(acquire(2, pages, overlap=True, priority=priority), 1)) == []


def silent(s, now, *, answer=()):
    """Let time pass in ticks; those in `answer` answer what they are asked."""
    out = []
    while now < 100:
        now += 1
        actions = s.handle(Tick(), now)
        out += actions
        for a in of(Ping, actions):
            if a.client in answer:
                out += s.handle(Pong(client=a.client), now)
        if of(Unresponsive, actions):
            break
    return out, now


def test_a_holder_that_does_not_answer_is_fenced_and_the_others_go_on():
    s = scheduler()
    for c in (1, 2):
        s.handle(joined(c), 0)
    g = running(s, 1, 4)
    waiting(s, 2)
    actions, now = silent(s, 0, answer=(2,))
    assert of(Unresponsive, actions)[0].client == 1
    assert 10 <= now <= 13, "ten seconds of silence are allowed"
    assert of(Fenced, actions) == [Fenced(client=1, generation=g)]
    assert [a.client for a in of(Grant, actions)] == [2]
    assert not s.describe(now)["clients"][0]["responsive"]
    assert s.handle(Release(client=1, generation=g, counts=all_dirty(4)), now) == [], "late: it is others' already"
    assert s.describe(now)["clients"][0]["responsive"]


def test_one_that_answers_keeps_its_lease_however_long_it_takes():
    s = scheduler()
    for c in (1, 2):
        s.handle(joined(c), 0)
    running(s, 1, 4)
    waiting(s, 2)
    actions, now = silent(s, 0, answer=(1, 2))
    assert now == 100
    assert of(Grant, actions) == of(Fenced, actions) == []


def test_nobody_is_asked_whether_it_lives_while_nobody_waits():
    s = scheduler()
    s.handle(joined(1), 0)
    running(s, 1, 4)
    assert s.next_deadline(50) is None
    assert s.handle(Tick(), 50) == []


def test_who_needs_pages_of_a_stopped_process_is_passed_over_by_those_who_do_not():
    s = scheduler(budget=10)
    for c in (1, 2, 3):
        s.handle(joined(c), 0)
    running(s, 1, 8)
    s.handle(acquire(2, 5), 0)
    s.handle(acquire(3, 2), 0)
    actions, now = silent(s, 0, answer=(2, 3))
    assert [a.client for a in of(Grant, actions)] == [3], "two pages are there, five are not"
    assert [r["job"] for r in s.describe(now)["queue"]] == ["job2"]


def test_a_job_that_can_never_fit_is_refused_when_it_joins_with_figures():
    s = scheduler(budget=10, limits={"small": Limits(device_bytes=4 << 20, host_bytes=7 << 20)})
    for job, need, text in (("any", 11, "there are 10 MiB"), ("small", 5, "the job may have 4 MiB")):
        with pytest.raises(CapacityError, match=text) as e:
            s.handle(joined(1, job=job, need=need << 20), 0)
        assert e.value.need == need << 20
    with pytest.raises(HostOutOfMemory, match="7 MiB"):
        s.handle(joined(1, job="small", host_need=8 << 20), 0)
    s.handle(joined(1, job="small", need=4 << 20, host_need=7 << 20), 0)
    (deny,) = of(Deny, s.handle(acquire(1, 5), 0))
    assert "may have 4 MiB" in deny.text


def test_a_jobs_page_budget_counts_all_its_processes():
    s = scheduler(budget=10, limits={"j": Limits(device_bytes=6 << 20)})
    s.handle(joined(1, job="j", name="sampler", group="sampler"), 0)
    s.handle(joined(2, job="j", name="trainer", group="trainer"), 0)
    turn(s, 1, 4, 0, 1)
    actions = s.handle(acquire(2, 4), 2)
    assert of(Give, actions) == [Give(client=2, count=2)], "six are free, and the job may have two more"
    assert of(Take, actions) == [Take(client=1, count=2)], "the rest comes from its other process"
    assert of(Give, s.handle(Returned(client=1, count=2, counts=all_dirty(2)), 3)) == [Give(client=2, count=2)]


def test_a_jobs_host_budget_counts_all_its_processes():
    s = scheduler(host_budget=100, limits={"j": Limits(host_bytes=50)})
    s.handle(joined(1, job="j", name="a", group="a"), 0)
    s.handle(joined(2, job="j", name="b", group="b"), 0)
    assert of(HostGrant, s.handle(host(1, 40), 0)) == [HostGrant(client=1, granted=40)]
    granted = answered(s, s.handle(host(2, 30, urgent=True), 0), 0)
    assert of(HostGrant, granted) == [HostGrant(client=2, granted=10, exhausted=True)]


def test_what_is_promised_on_a_release_is_granted_on_it():
    s = scheduler()
    for c in (1, 2, 3):
        s.handle(joined(c), 0)
    g = running(s, 1, 2)
    (promise,) = of(Promise, waiting(s, 2))
    assert (promise.client, promise.generation, promise.grant.client) == (1, g, 2)
    assert of(Promise, waiting(s, 3)) == [], "it stays so"
    assert promise.grant in s.handle(Release(client=1, generation=g), 1)


def test_a_promise_is_taken_back_when_its_heir_gives_up():
    s = scheduler()
    for c in (1, 2):
        s.handle(joined(c), 0)
    g = running(s, 1, 2)
    waiting(s, 2)
    assert of(Promise, s.handle(Cancel(client=2, seq=1), 1)) == [Promise(client=1, generation=g, grant=None)]
    assert of(Grant, s.handle(Release(client=1, generation=g), 2)) == []


def test_a_client_that_comes_back_to_a_new_broker_too_late_is_told_that_its_lease_is_gone():
    s = scheduler(frozen_until=1.0)
    s.handle(joined(1), 0)
    s.handle(acquire(1, 2), 0)
    assert of(Grant, s.handle(Tick(), 1.0))
    assert of(Fenced, s.handle(joined(2, held=3, lease_generation=7), 2)) == [Fenced(client=2, generation=7)]
    assert s.table.leases["job1", "main"].members == {1}
