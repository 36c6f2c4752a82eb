"""Phases of several threads, tasks, coroutines and generators of one process."""

import asyncio
import contextlib
import gc
import threading
import time

import pytest

import pymux
from tests.conftest import PAGE, hear, say
from tests.test_handoff import job, order


@pytest.fixture
def mux():
    with pymux.connect("turns") as m:
        yield m


def in_threads(*bodies):
    """Run each in a thread; raises what one raised."""
    failed = []

    def call(body):
        try:
            body()
        except BaseException as e:
            failed.append(e)

    threads = [threading.Thread(target=call, args=(b,)) for b in bodies]
    for t in threads:
        t.start()
    for t in threads:
        t.join(60)
        assert not t.is_alive()
    if failed:
        raise failed[0]


def until(condition):
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def waiting(mux, n):
    until(lambda: len(mux._turns._queue) == n)


# ---- threads ----------------------------------------------------------------------------------


def test_another_thread_waits_for_its_turn(mux):
    order = []

    def second():
        with mux.phase("second"):
            order.append("second in")

    with mux.phase("first"):
        t = threading.Thread(target=second)
        t.start()
        waiting(mux, 1)
        order.append("first out")
    t.join(60)
    assert order == ["first out", "second in"]


def test_phases_of_threads_never_overlap_and_take_turns(mux):
    inside, taken = [], []

    def work(me):
        for _ in range(20):
            with mux.phase("work"):
                inside.append(me)
                assert inside == [me]
                time.sleep(0.002)  # longer than who comes back may overtake
                taken.append(me)
                inside.remove(me)

    in_threads(*(lambda me=me: work(me) for me in range(3)))
    assert len(taken) == 60
    both = [i for i in range(1, 60) if taken[i] == taken[i - 1] and i < 50]
    assert len(both) <= 3, taken  # at first, when not all had begun


def test_the_thread_that_has_the_phase_is_told_that_they_do_not_nest(mux):
    with mux.phase("outer"), pytest.raises(pymux.LeaseError, match=r"'inner'.*inside phase 'outer'.*nest"):
        mux.phase("inner").__enter__()
    with mux.phase("again"):
        pass


def test_a_turn_that_does_not_come_in_time_is_an_error_and_takes_nothing_with_it(mux):
    def late():
        with pytest.raises(pymux.AcquireTimeout, match=r"its turn within 0.05 s: phase 'long'"):
            mux.phase("late", timeout=0.05).__enter__()

    with mux.phase("long"):
        in_threads(late)
    with mux.phase("after", timeout=60):
        pass


def test_a_thread_that_waits_can_be_interrupted(node):
    p = node.start(
        """
import threading, signal
mux = pymux.connect("a")
held, go = threading.Event(), threading.Event()
def hold():
    with mux.phase("long"): held.set(); go.wait()
t = threading.Thread(target=hold); t.start(); held.wait()
say("waits")
try:
    with mux.phase("mine"): say("entered")
except KeyboardInterrupt:
    say("interrupted")
go.set(); t.join()
with mux.phase("mine"): say("entered")
"""
    )
    import signal

    assert hear(p) == "waits"
    time.sleep(0.3)
    p.send_signal(signal.SIGINT)
    assert hear(p) == "interrupted"
    assert hear(p) == "entered"


def test_a_closed_mux_lets_nobody_wait(mux):
    def second():
        with pytest.raises(pymux.LeaseError, match="closed"):
            mux.phase("second").__enter__()

    phase = mux.phase("first")
    phase.__enter__()
    t = threading.Thread(target=in_threads, args=(second,))
    t.start()
    waiting(mux, 1)
    mux.close()
    t.join(60)
    assert not t.is_alive()


def test_other_threads_run_while_a_phase_is_idle(mux):
    order = []

    def second():
        with mux.phase("second"):
            order.append("second")

    with mux.phase("first") as lease:
        t = threading.Thread(target=second)
        t.start()
        waiting(mux, 1)
        with lease.idle():
            t.join(60)
            order.append("idle")
        order.append("first")
    assert order == ["second", "idle", "first"]


def test_a_region_block_of_a_helping_thread_joins_the_phase_and_keeps_it_open(mux):
    region = mux.region("w")
    inside, go, left = threading.Event(), threading.Event(), threading.Event()
    blocks = []

    def help_out():
        with region:
            inside.set()
            go.wait(60)
            assert not left.is_set(), "the phase waits for what is filled in it"
            blocks.append(region.allocate(PAGE))

    t = threading.Thread(target=in_threads, args=(help_out,))
    with mux.phase("loop"):
        t.start()
        assert inside.wait(60)
        threading.Timer(0.2, go.set).start()
    left.set()
    t.join(60)
    assert len(blocks) == 1


def test_region_blocks_of_threads_end_their_own(mux):
    region = mux.region("w")
    first, second = threading.Event(), threading.Event()

    def one():
        with region:
            first.set()
            second.wait(60)

    def two():
        first.wait(60)
        with region:
            second.set()
        assert mux.active, "the other block is open"

    in_threads(one, two)
    assert not mux.active


# ---- coroutines ---------------------------------------------------------------------------------


def test_tasks_take_turns_and_the_event_loop_goes_on(mux):
    ticks, taken = [], []

    async def work(me):
        for _ in range(5):
            async with mux.phase("work") as lease:
                assert lease.phase == "work"
                assert mux.active
                await asyncio.sleep(0.005)
                taken.append(me)

    async def tick():
        while len(taken) < 10:
            ticks.append(1)
            await asyncio.sleep(0.001)

    async def main():
        await asyncio.gather(work(1), work(2), tick())

    asyncio.run(main())
    assert sorted(taken) == [1] * 5 + [2] * 5
    assert [1, 1, 1] not in [taken[i : i + 3] for i in range(8)]
    assert len(ticks) > 10
    assert not mux.active


def test_a_task_waits_for_another_process_without_blocking_the_loop(node):
    a = job(node, "a", 1, pages=4)
    assert order(a, "hold") == "holding"
    b = node.start(
        """
import asyncio
async def main():
    mux = pymux.connect("b")
    async def tick():
        while True:
            await asyncio.sleep(0.001); beats.append(1)
    beats = []
    t = asyncio.create_task(tick())
    async def use():
        async with mux.phase("p") as lease:
            say(f"in {len(beats) > 20}")
            assert await lease.yield_point() is False
    waits = asyncio.create_task(use())
    while len(beats) < 50: await asyncio.sleep(0.001)
    say("waits")
    await waits
    t.cancel()
asyncio.run(main())
"""
    )
    assert hear(b) == "waits"
    say(a)
    assert hear(a) == "left"
    assert hear(b) == "in True"
    assert b.wait(60) == 0, b.stderr.read()


@pytest.mark.parametrize("behind", ["a thread", "another process"])
def test_cancellation_withdraws_the_request(node, behind):
    a = job(node, "a", 1, pages=4)
    if behind == "another process":
        assert order(a, "hold") == "holding"
    b = node.start(
        f"""
import asyncio
async def main():
    mux = pymux.connect("b")
    holder = None
    if {behind!r} == "a thread":
        holder = mux.phase("held"); holder.mux._enter(holder, detached=True)
    async def use():
        async with mux.phase("p"): say("entered")
    t = asyncio.create_task(use())
    await asyncio.sleep(0.3)
    t.cancel()
    try: await t
    except asyncio.CancelledError: say("cancelled")
    if holder: holder.__exit__(None, None, None)
    try:
        async with mux.phase("p", timeout=0.2): say("entered")
    except pymux.AcquireTimeout as e: say(e)
    hear()
asyncio.run(main())
"""
    )
    assert hear(b) == "cancelled"
    if behind == "another process":
        assert "did not get the device within 0.2 s" in hear(b)
        node.until(lambda s: not s["queue"])
        say(a)
        assert hear(a) == "left"
    else:
        assert hear(b) == "entered"


def test_a_cancelled_body_gives_the_device_back(mux):
    async def body():
        async with mux.phase("p"):
            await asyncio.sleep(60)

    async def main():
        t = asyncio.create_task(body())
        while not mux.active:
            await asyncio.sleep(0.001)
        t.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await t
        assert not mux.active
        async with mux.phase("q", timeout=60):
            pass

    asyncio.run(main())


def test_other_tasks_run_while_one_is_idle(mux):
    order, done = [], asyncio.Event()

    async def first():
        async with mux.phase("first") as lease:
            order.append("first")
            async with lease.idle(expect=0.1):
                await done.wait()
                order.append("idle over")
            assert mux.active
            order.append("first again")

    async def second():
        while "first" not in order:
            await asyncio.sleep(0.001)
        async with mux.phase("second"):
            order.append("second")
        done.set()

    async def main():
        await asyncio.gather(first(), second())

    asyncio.run(main())
    assert order == ["first", "second", "idle over", "first again"]


def test_a_task_may_require_and_be_done_with_regions(mux):
    region = mux.region("w")
    with mux.phase("init"):
        block = region.allocate(PAGE)
    mux.evict()

    async def main():
        async with mux.phase("p", uses=(), lazy=("w",)) as lease:
            await lease.require("w")
            memoryview(block)[:4] = b"abcd"
            await lease.done_with("w")
            with pytest.raises(pymux.UnknownRegion):
                await lease.require("other")

    asyncio.run(main())


def test_a_blocking_phase_that_would_stop_the_loop_it_waits_for_is_refused(mux):
    async def other():
        async with mux.phase("a"):
            await asyncio.sleep(0.2)

    async def main():
        t = asyncio.create_task(other())
        while not mux.active:
            await asyncio.sleep(0.001)
        with pytest.raises(pymux.LeaseError, match="async with"):
            mux.phase("b").__enter__()
        await t
        with mux.phase("alone"):  # where nobody is in the way it is as good
            pass

    asyncio.run(main())


def test_a_task_inside_of_a_phase_of_its_own_thread_is_told_that_they_do_not_nest(mux):
    async def main():
        async with mux.phase("inner"):
            pass

    with mux.phase("outer"), pytest.raises(pymux.LeaseError, match="nest"):
        asyncio.run(main())


def test_tasks_of_several_loops_and_threads_take_turns(mux):
    taken = []

    def loop(me):
        async def main():
            for _ in range(5):
                async with mux.phase("p"):
                    taken.append(me)
                    await asyncio.sleep(0.002)

        asyncio.run(main())

    def thread():
        for _ in range(5):
            with mux.phase("p"):
                taken.append("thread")
                time.sleep(0.002)

    in_threads(lambda: loop("a"), lambda: loop("b"), thread)
    assert sorted(taken) == ["a"] * 5 + ["b"] * 5 + ["thread"] * 5


def test_a_waiter_whose_loop_is_gone_is_skipped(mux):
    async def waits():
        async with mux.phase("never"):
            pass

    loop = asyncio.new_event_loop()
    with mux.phase("held"):

        def abandon():
            t = loop.create_task(waits())
            loop.call_later(0.05, loop.stop)
            loop.run_forever()
            t._log_destroy_pending = False
            loop.close()

        in_threads(abandon)
    with mux.phase("next", timeout=60):
        pass
    gc.collect()


# ---- decorators ---------------------------------------------------------------------------------


def test_the_decorator_holds_the_phase_while_the_body_runs_whatever_kind_it_is_of(mux):
    @mux.phase("p")
    def function():
        return mux.active

    @mux.phase("p")
    async def coroutine():
        await asyncio.sleep(0)
        return mux.active

    @mux.phase("p")
    def generator():
        sent = yield mux.active
        yield (sent, mux.active)

    @mux.phase("p")
    async def asynchronous():
        sent = yield mux.active
        yield (sent, mux.active)

    class Model:
        @mux.phase("p")
        async def method(self):
            return (type(self), mux.active)

    class Plain:
        async def __call__(self):
            await asyncio.sleep(0)
            return mux.active

    assert function() is True
    g = generator()
    assert not mux.active, "its body has not begun"
    assert next(g) is True
    assert g.send(5) == (5, True)
    assert mux.active
    assert list(g) == []
    assert not mux.active

    async def main():
        assert await coroutine() is True
        assert await Model().method() == (Model, True)
        assert await mux.phase("q")(Plain())() is True
        a = asynchronous()
        assert await a.asend(None) is True
        assert await a.asend(6) == (6, True)
        await a.aclose()
        assert [x async for x in asynchronous()] == [True, (None, True)]

    asyncio.run(main())
    assert not mux.active


def test_errors_end_the_phase_of_a_decorated_body(mux):
    @mux.phase("p")
    def generator():
        try:
            yield 1
        except ValueError:
            yield 2
        raise RuntimeError("body")

    @mux.phase("p")
    async def asynchronous():
        try:
            yield 1
        except ValueError:
            yield 2
        raise RuntimeError("body")

    g = generator()
    assert next(g) == 1
    assert g.throw(ValueError()) == 2
    with pytest.raises(RuntimeError, match="body"):
        next(g)
    assert not mux.active

    async def main():
        a = asynchronous()
        assert await a.asend(None) == 1
        assert await a.athrow(ValueError()) == 2
        with pytest.raises(RuntimeError, match="body"):
            await a.asend(None)

    asyncio.run(main())
    assert not mux.active


def test_a_generator_that_is_left_alone_gives_the_device_back(mux):
    @mux.phase("p")
    def generator():
        yield 1
        yield 2

    for _ in generator():
        break
    gc.collect()
    assert not mux.active


def test_a_function_that_only_returns_a_coroutine_is_refused(mux):
    async def body():
        return 1

    @mux.phase("p")
    def hides():
        return body()

    with pytest.raises(TypeError, match=r"'hides'.*coroutine.*after the phase"):
        hides()
    with pytest.raises(TypeError, match="cannot be called"):
        mux.phase("p")(5)
    assert not mux.active


def test_decorated_functions_keep_their_names(mux):
    @mux.phase("p")
    async def rollout():
        """What it does."""

    assert (rollout.__name__, rollout.__doc__) == ("rollout", "What it does.")
    assert asyncio.iscoroutinefunction(rollout)
