"""What a node's owner may write, and what is said of what makes no sense."""

import pytest

from pymux import rules
from pymux.errors import ConfigError
from pymux.jobs import Limits


@pytest.fixture
def load(tmp_path):
    def load(text):
        (tmp_path / "broker.toml").write_text(text)
        return rules.load(tmp_path / "broker.toml")

    return load


def test_a_file_sets_policy_bounds_and_what_jobs_may_have(load):
    r = load(
        """
policy = "fair"
max_wait = 30
unresponsive_after = 2.5
kill_unresponsive = true
[default]
host = "8G"
[jobs.math-grpo]
weight = 2
priority = -1
device = "20G"
"""
    )
    assert (r.policy, r.max_wait, r.unresponsive_after, r.kill_unresponsive) == ("fair", 30, 2.5, True)
    assert r.default == Limits(host_bytes=8 << 30)
    assert r.jobs["math-grpo"] == Limits(weight=2, priority=-1, device_bytes=20 << 30, host_bytes=8 << 30)


def test_options_add_to_the_file(load):
    r = rules.with_jobs(load('[jobs.a]\nweight = 3\ndevice = "1G"'), ["a:weight=2", "b:host=4G,priority=1"])
    assert r.jobs["a"] == Limits(weight=2, device_bytes=1 << 30)
    assert r.jobs["b"] == Limits(priority=1, host_bytes=4 << 30)


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("polcy = 'fair'", "polcy"),
        ("policy = 'lottery'", "fifo"),
        ("policy = 3", "policy"),
        ("max_wait = 0", "max_wait"),
        ("max_wait = true", "max_wait"),
        ("unresponsive_after = -1", "unresponsive_after"),
        ("jobs = 3", "tables"),
        ("[jobs.a]\nweights = 2", "weights"),
        ("[jobs.a]\nweight = 0", "weight"),
        ("[jobs.a]\nweight = 'heavy'", "weight"),
        ("[jobs.a]\ndevice = 'much'", "much"),
        ("[jobs]\na = 3", "table"),
        ("policy = ", "TOML"),
    ],
)
def test_mistakes_are_named(load, text, what):
    with pytest.raises(ConfigError, match=what):
        load(text)


@pytest.mark.parametrize("option", ["a", "a:", ":weight=2", "a:weight", "a:weight=x", "a:colour=red"])
def test_mistakes_in_options_are_named(option):
    with pytest.raises(ConfigError, match="--job"):
        rules.with_jobs(rules.Rules(), [option])


def test_a_file_that_is_not_there_is_named(tmp_path):
    with pytest.raises(ConfigError, match="nowhere"):
        rules.load(tmp_path / "nowhere.toml")


def test_a_group_that_is_not_there_is_named():
    with pytest.raises(ConfigError, match="no-such-group"):
        rules.Rules(allow_groups=("no-such-group",)).group_ids()
