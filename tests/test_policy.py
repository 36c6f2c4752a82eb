"""Who is next under each policy, how long others may go first, and what jobs get in virtual time."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pymux import policy
from pymux.errors import ConfigError
from pymux.estimator import Durations, SwitchCost
from pymux.jobs import Job, Limits
from pymux.plan import Phase, Work, simulate
from pymux.policy import Candidate

BOUND = 100.0


def order(name, *candidates, now=10.0):
    return policy.make(name, BOUND).order(candidates, now)


def test_fifo_goes_by_arrival():
    assert order("fifo", Candidate(arrived=2), Candidate(arrived=1), Candidate(arrived=3)) == [1, 0, 2]


def test_fair_prefers_the_job_that_was_slowed_down_most_for_its_weight():
    slow = Candidate(arrived=2, elapsed=10, solo=4, remaining=1)
    fast = Candidate(arrived=1, elapsed=10, solo=9, remaining=1)
    assert order("fair", fast, slow) == [1, 0]
    heavy = Candidate(arrived=1, elapsed=10, solo=9, remaining=1, weight=4)
    assert order("fair", heavy, slow) == [0, 1]


def test_fair_charges_a_switch_to_the_one_it_is_made_for():
    near = Candidate(arrived=2, elapsed=10, solo=5, remaining=1)
    far = Candidate(arrived=1, elapsed=10, solo=5, remaining=1, cost=5)
    assert order("fair", far, near) == [1, 0]


def test_priority_goes_by_urgency_until_patience_outweighs_it():
    urgent, patient = Candidate(arrived=9, priority=-1), Candidate(arrived=8, priority=0)
    assert order("priority", patient, urgent) == [1, 0]
    assert order("priority", Candidate(arrived=-20, priority=0), urgent) == [0, 1]


def test_srpt_prefers_what_is_soon_over_with_its_switch():
    assert order("srpt", Candidate(arrived=1, remaining=5), Candidate(arrived=2, remaining=2, cost=1)) == [1, 0]
    assert order("srpt", Candidate(arrived=1, remaining=5), Candidate(arrived=2, remaining=2, cost=4)) == [0, 1]


@pytest.mark.parametrize("name", sorted(policy.POLICIES))
@given(data=st.data())
def test_nobody_is_overtaken_after_the_wait_bound(name, data):
    numbers = st.floats(0.01, 1e3)
    others = data.draw(
        st.lists(
            st.builds(
                Candidate, arrived=st.floats(100, 1000), remaining=numbers, cost=numbers, elapsed=numbers,
                priority=st.integers(-5, 5), weight=numbers, solo=numbers,
            ),
            max_size=6,
        )
    )  # fmt: skip
    late = Candidate(arrived=0, remaining=1e9, cost=1e9, priority=5)
    now = data.draw(st.floats(1000, 1e6))
    assert policy.make(name, BOUND).order([*others, late], now)[0] == len(others)


@pytest.mark.parametrize("name", sorted(policy.POLICIES))
def test_a_phase_gives_way_only_when_the_switch_has_paid_for_itself(name):
    p = policy.make(name, BOUND)
    waiting = Candidate(arrived=5, remaining=1, cost=0.1, elapsed=10, solo=1, priority=-1)
    for ran, yields in ((1.0, False), (3.0, True)):
        running = Candidate(arrived=0, ran=ran, remaining=50, cost=0.1, elapsed=10, solo=9)
        assert p.yields(running, waiting, 10.0) is yields


@pytest.mark.parametrize("name", ["fair", "priority", "srpt"])
def test_a_phase_does_not_give_way_to_one_that_is_no_better_off_for_it(name):
    p = policy.make(name, BOUND)
    running = Candidate(arrived=0, ran=5, remaining=1, elapsed=10, solo=5)
    assert not p.yields(running, Candidate(arrived=1, remaining=1, elapsed=10, solo=5), 1.0)


def test_under_fair_the_heavier_jobs_phases_may_follow_each_other_until_it_is_even():
    p = policy.make("fair", BOUND)
    running = Candidate(arrived=9, ran=1, remaining=1, elapsed=100, solo=50, weight=4)
    waiting = Candidate(arrived=9, remaining=1, elapsed=100, solo=50, weight=1)
    extend = p.extends(running, waiting, 10.0)
    assert 0 < extend <= BOUND
    after = Candidate(arrived=9, ran=1, remaining=1, elapsed=100 + extend, solo=50 + extend, weight=4)
    still = Candidate(arrived=9, remaining=1, elapsed=100 + extend, solo=50, weight=1)
    assert p.key(after, 0) == pytest.approx(p.key(still, 0)) or extend == pytest.approx(BOUND - 1)
    assert policy.make("fifo", BOUND).extends(running, waiting, 10.0) == 0


def test_an_unknown_policy_is_refused_with_the_known_ones():
    with pytest.raises(ConfigError, match="fifo, fair, priority, srpt"):
        policy.make("lottery", BOUND)


# ---- what is learnt ---------------------------------------------------------------------------------


def test_a_phase_is_expected_to_take_what_it_took_and_growth_is_followed():
    d = Durations()
    assert d.expect("j", "rollout") is None
    for _ in range(20):
        d.learn("j", "rollout", 1, 10.0)
    assert d.expect("j", "rollout") == pytest.approx(10.0)
    assert d.expect("j", "train") is None
    for i in range(40):
        d.learn("j", "rollout", 1, 10.0 + i)
    assert d.expect("j", "rollout") == pytest.approx(50.0, rel=0.05), "a mean alone would lag behind by more"
    d.learn("j", "rollout", 4, 4 * 50.0)
    d.forget("j")
    assert d.expect("j", "rollout") is None


def test_the_cost_of_a_page_follows_the_latest_switches():
    c = SwitchCost()
    c.learn(0, 5.0)
    assert c.per_page == 0
    c.learn(10, 1.0)
    assert c.per_page == pytest.approx(0.1)
    for _ in range(20):
        c.learn(10, 2.0)
    assert c.per_page == pytest.approx(0.2, rel=0.01)


def test_a_job_is_blocked_while_it_waits_and_has_no_device():
    j = Job(name="j", limits=Limits(), at=0.0)
    j.advance(10.0)
    j.waiting = 1
    j.advance(20.0)
    j.holding = 1  # another of its processes runs
    j.advance(30.0)
    assert j.elapsed == pytest.approx(30, rel=0.05)
    assert j.blocked == pytest.approx(10, rel=0.05)


# ---- virtual time -----------------------------------------------------------------------------------


def endless(job, seconds=1.0, **kw):
    return Work(job=job, steps=[[Phase(name="p", seconds=seconds)]], pages=60, **kw)


def play(name, *jobs, until=600.0):
    return simulate(jobs, policy.make(name, BOUND), pages=100, page_seconds=0.001, until=until)


def test_device_time_follows_the_weights():
    out = play("fair", *(endless(str(w), limits=Limits(weight=w)) for w in (1, 2, 4)), until=700.0)
    total = sum(o.device_seconds for o in out.values())
    for w in (1, 2, 4):
        assert out[str(w)].device_seconds / total == pytest.approx(w / 7, rel=0.1)


def test_fair_protects_the_job_of_short_phases():
    short = Work(job="short", steps=[[Phase(name="p", seconds=1), Phase(name="x", seconds=1, device=False)]], pages=60)
    worst = {n: play(n, short, endless("a", 20), endless("b", 20))["short"].slowdown for n in ("fifo", "fair")}
    assert worst["fair"] < 0.75 * worst["fifo"]


@pytest.mark.parametrize("name", sorted(policy.POLICIES))
def test_everybody_gets_on_under_every_policy(name):
    jobs = [
        endless("a", 5, yield_every=0.5, limits=Limits(priority=-3)),
        endless("b", 1, yield_every=0.5),
        endless("c", 30, yield_every=0.5, limits=Limits(priority=3)),
    ]
    out = play(name, *jobs, until=800.0)
    assert all(o.device_seconds > 0 for o in out.values())
    assert sum(o.device_seconds for o in out.values()) > 0.85 * 800
