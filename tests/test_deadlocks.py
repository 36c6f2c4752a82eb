"""Waits that would never end are errors; waits for who works on are not."""

import pytest

from pymux.deadlocks import CONFIRM_SECONDS, Deadlocks, Wait, explain
from pymux.events import Acquire, Deny, Grant, Kept, Queued, Ready, Recall, Release, Tick
from tests.conftest import hear, say
from tests.test_scheduler import joined, of, scheduler

A, B, C = (1, 10), (2, 20), (3, 30)


def wait(who, *behind, order=0):
    return Wait(who=who, behind=dict.fromkeys(behind, "what it has"), order=order, what=f"request {order}")


def look(*waits):
    d = Deadlocks()
    assert d.look(waits, 0.0) == [], "not before it lasts"
    assert d.look(waits, CONFIRM_SECONDS / 2) == []
    return [w.who for w in d.look(waits, CONFIRM_SECONDS)]


def test_a_cycle_is_found_and_its_youngest_wait_comes_first():
    assert look(wait(A, B, order=5), wait(B, A, order=3)) == [A, B]
    assert look(wait(A, B, order=1), wait(B, C, order=3), wait(C, A, order=2)) == [B, C, A]
    assert look(wait(A, A)) == [A]


def test_who_waits_for_somebody_who_works_on_is_in_none():
    assert look(wait(A, B), wait(B, C)) == []
    assert look(wait(A, B), wait((1, 11), B)) == [], "another thread"
    assert look() == []


def test_what_changed_meanwhile_is_looked_at_anew():
    d = Deadlocks()
    d.look([wait(A, B, order=1), wait(B, A, order=2)], 0.0)
    assert d.look([wait(A, B, order=1), wait(B, A, order=7)], CONFIRM_SECONDS) == [], "another request"
    assert d.look([], 2 * CONFIRM_SECONDS) == []


def test_the_text_names_the_cycle_and_the_remedy_in_few_words():
    name = "a-very-long-name.../another-quite-l... (pid 4194304)"
    long = [Wait(who=(i, i), behind={(j, j): name for j in range(9)}, order=i, what=None) for i in range(9)]
    for cycle in (long[:1], long[:2], long):
        text = explain(cycle, "p" * 63)
        assert "connect(devices=[0, 1])" in text
        assert len(text) < 512, "the message has room for so much"


# ---- the scheduler ------------------------------------------------------------------------------


def two_devices():
    s = scheduler(devices=("D0", "D1"))
    for client, job, device, process in ((1, "a", "D0", 7), (2, "a2", "D1", 7), (3, "b", "D0", 8), (4, "b2", "D1", 8)):
        s.handle(joined(client, job=job, device=device, process=process), 0)
    return s


def enters(s, client, opener, seq=1, now=0.0):
    out = s.handle(Acquire(client=client, seq=seq, phase=f"p{client}", want=0, opener=opener), now)
    for g in of(Grant, out):
        if g.client == client:
            s.handle(Ready(client=client, generation=g.generation), now)
            return g.generation
    for r in of(Recall, out):  # the others answer that their body runs
        s.handle(Kept(client=r.client, generation=r.generation, opener=OPENERS[r.client]), now)
    return 0


OPENERS = {1: 70, 2: 70, 3: 80, 4: 80}


def denials(s, now=1.0):
    out = []
    for i in range(20):
        out += of(Deny, s.handle(Tick(), now + i * 0.1))
    return out


def test_two_processes_that_nest_two_devices_in_opposite_order():
    s = two_devices()
    assert enters(s, 1, 70)
    assert enters(s, 4, 80)
    assert not enters(s, 2, 70)
    assert denials(s) == []
    assert not enters(s, 3, 80)
    (deny,) = denials(s, 9.0)
    assert (deny.client, deny.error) == (3, "DeadlockError")
    assert "for a/main (pid 7), whose thread waits for b2/main (pid 8), which this thread has open" in deny.text
    assert [r["job"] for r in s.describe(20)["queue"]] == ["a2"], "the other waits on"


def test_another_thread_of_the_holder_works_on():
    s = two_devices()
    enters(s, 1, 70)
    enters(s, 4, 80)
    enters(s, 2, 71)
    enters(s, 3, 80)
    assert denials(s) == []


def test_a_parked_lease_is_nobodys():
    s = two_devices()
    generation = enters(s, 1, 70)
    enters(s, 4, 80)
    enters(s, 2, 70)
    enters(s, 3, 80)
    s.handle(Kept(client=1, generation=generation, opener=0), 0.5)  # its body has ended
    assert denials(s) == []
    s.handle(Kept(client=1, generation=generation, opener=70), 5.0)  # and begun again
    assert len(denials(s, 6.0)) == 1


def test_a_turn_within_a_process_may_be_part_of_it():
    s = two_devices()
    enters(s, 1, 70)  # this thread has device 0, and waits for its turn behind 71
    s.handle(Queued(client=2, seq=1 << 63, opener=70, behind=71), 0)
    enters(s, 4, 80)
    enters(s, 2, 71)  # which waits for device 1
    enters(s, 3, 80)  # whose holder waits for device 0
    (deny,) = denials(s)
    assert deny.client == 3
    s.handle(Release(client=4, generation=2), 9)
    assert denials(s, 10.0) == []


def test_turns_within_a_process_alone():
    s = two_devices()
    s.handle(Queued(client=1, seq=1 << 63, opener=70, behind=71), 0)
    assert s.next_deadline(0) is not None
    s.handle(Queued(client=2, seq=1 << 63 | 1, opener=71, behind=70), 0)
    (deny,) = denials(s)
    assert (deny.client, deny.seq, deny.error) == (2, 1 << 63 | 1, "DeadlockError")
    s.handle(Queued(client=2, seq=1 << 63 | 1, opener=71, behind=0), 5)
    s.handle(Queued(client=1, seq=1 << 63, opener=70, behind=0), 5)
    assert denials(s, 6.0) == []
    assert s.next_deadline(9) is None


# ---- processes ------------------------------------------------------------------------------------

NESTS = """
first, second = json.loads(os.environ["ORDER"])
job = os.environ["JOB"]
muxes = {d: pymux.connect(f"{job}{d}", device=d) for d in (0, 1)}
with muxes[first].phase("outer"):
    say("outer")
    hear()
    try:
        with muxes[second].phase("inner"): say("inner")
    except pymux.DeadlockError as e:
        say(e)
say("out")
hear()
"""


def test_the_youngest_wait_fails_and_the_other_goes_on(node_factory):
    node = node_factory("64M", PYMUX_SIM_DEVICES="2")
    a, b = node.start(NESTS, JOB="a", ORDER="[0, 1]"), node.start(NESTS, JOB="b", ORDER="[1, 0]")
    assert hear(a) == hear(b) == "outer"
    say(a)
    node.until(lambda s: s["queue"])
    say(b)
    text = hear(b)
    assert "phase 'inner' would wait for ever" in text
    assert f"(pid {a.pid})" in text
    assert f"(pid {b.pid})" in text
    assert "connect(devices=[0, 1])" in text
    assert hear(b) == "out"
    assert hear(a) == "inner"
    assert hear(a) == "out"


def test_two_connections_of_one_thread_on_one_device(node):
    out = node.run(
        """
a, b = pymux.connect("a"), pymux.connect("b")
with a.phase("outer"):
    try: b.phase("inner").__enter__()
    except pymux.DeadlockError as e: say(e)
with b.phase("inner"): say("entered")
"""
    )
    error, entered = out.splitlines()
    assert "phase 'inner' would wait for ever: for a/main" in error
    assert entered == "entered"


@pytest.mark.parametrize("how", ["threads", "tasks"])
def test_two_threads_or_tasks_of_one_process(node_factory, how):
    node = node_factory("64M", PYMUX_SIM_DEVICES="2")
    out = node.run(
        f"""
import asyncio, threading
m = [pymux.connect(f"j{{d}}", device=d) for d in (0, 1)]
failed, barrier = [], threading.Barrier(2)
def nest(first, second):
    try:
        with m[first].phase("outer"):
            barrier.wait()
            with m[second].phase("inner"): pass
    except pymux.DeadlockError as e: failed.append(e)
async def nest_async(first, second):
    try:
        async with m[first].phase("outer"):
            await asyncio.sleep(0.2)
            async with m[second].phase("inner"): pass
    except pymux.DeadlockError as e: failed.append(e)
async def main(): await asyncio.gather(nest_async(0, 1), nest_async(1, 0))
if {how!r} == "threads":
    threads = [threading.Thread(target=nest, args=x) for x in ((0, 1), (1, 0))]
    [t.start() for t in threads]; [t.join() for t in threads]
else:
    asyncio.run(main())
say(len(failed))
"""
    )
    assert out.strip() == "1"


def test_no_alarm_while_the_holders_other_thread_works_on(node_factory):
    node = node_factory("64M", PYMUX_SIM_DEVICES="2")
    a = node.start(
        """
import threading
m = [pymux.connect(f"a{d}", device=d) for d in (0, 1)]
go = threading.Event()
def work():
    with m[0].phase("outer"): go.wait()
t = threading.Thread(target=work); t.start()
while not m[0].active: time.sleep(0.001)
say("outer")
hear()
def ask():
    with m[1].phase("other"): say("other")
u = threading.Thread(target=ask); u.start()
hear()
go.set()
t.join(); u.join()
"""
    )
    b = node.start(NESTS, JOB="b", ORDER="[1, 0]")
    assert hear(a) == hear(b) == "outer"
    say(a)
    node.until(lambda s: len(s["queue"]) == 1)
    say(b)
    waited = node.until(lambda s: len(s["queue"]) == 2 and s["queue"][1]["seconds"] > 0.5)
    assert {r["job"] for r in waited["queue"]} == {"a1", "b0"}
    say(a)
    assert hear(b) == "inner"
    assert hear(a) == "other"
