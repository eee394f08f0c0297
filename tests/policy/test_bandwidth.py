"""The bandwidth monitor: what a step's sample is, and what disturbs it."""

import pytest

from grace_ext import ConfigError
from grace_ext.policy.bandwidth import BandwidthMonitor, union_length


def one_step(monitor, *collectives):
    for sent, started, ended in collectives:
        monitor.add(sent, started, ended)
    monitor.end_step()


@pytest.mark.parametrize(
    "spans, total",
    [
        ([], 0),
        ([(1, 2)], 1),
        ([(1, 3), (2, 4)], 3),
        ([(2, 4), (1, 3)], 3),
        ([(1, 10), (2, 3)], 9),
        ([(1, 2), (4, 6)], 3),
        ([(1, 2), (2, 3)], 2),
    ],
)
def test_union(spans, total):
    assert union_length(spans) == total


def test_a_step_counts_the_time_in_which_something_was_under_way():
    monitor = BandwidthMonitor()
    one_step(monitor, (10_000, 0.0, 1.0), (20_000, 0.5, 2.0), (30_000, 5.0, 6.0))
    assert monitor.estimate == 60_000 / 3


def test_the_estimate_is_the_median_of_the_last_steps():
    monitor = BandwidthMonitor(window=3)
    for seconds in (1, 2, 100):  # one step was disturbed
        one_step(monitor, (100_000, 0, seconds))
    assert monitor.estimate == 50_000
    for _ in range(3):
        one_step(monitor, (100_000, 0, 10))
    assert monitor.estimate == 10_000
    assert monitor.samples == (10_000, 10_000, 10_000)


def test_steps_that_nobody_waited_for_raise_the_estimate():
    monitor = BandwidthMonitor(window=1)
    one_step(monitor, (100_000, 0, 1))
    for expected in (125_000, 156_250):
        monitor.add(100_000, 0, 10, late=True)
        monitor.end_step()
        assert monitor.estimate == expected
    monitor.add(900_000, 0, 2, late=True)
    monitor.end_step()
    assert monitor.estimate == 450_000
    monitor.add(100_000, 0, 1, late=True)
    monitor.add(100_000, 0, 2)  # the step had to wait after all
    monitor.end_step()
    assert monitor.estimate == 100_000


def test_prior_and_steps_that_tell_nothing():
    monitor = BandwidthMonitor(prior=1e6)
    assert monitor.estimate == 1e6 and BandwidthMonitor().estimate is None
    one_step(monitor)
    one_step(monitor, (0, 0, 1))  # no bytes
    one_step(monitor, (100_000, 1, 1))  # no time
    assert monitor.estimate == 1e6
    monitor.add(100_000, 0, 1)
    monitor.abort()
    one_step(monitor)
    assert monitor.estimate == 1e6
    one_step(monitor, (100_000, 0, 1))
    assert monitor.estimate == 100_000


@pytest.mark.parametrize("wrong", [{"window": 0}, {"prior": 0}, {"prior": float("nan")}])
def test_numbers_that_make_no_sense(wrong):
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        BandwidthMonitor(**wrong)
