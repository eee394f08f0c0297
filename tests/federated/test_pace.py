"""A round's time becomes a budget of bytes, and a budget a density."""

import math

import numpy as np
import pytest

import grace_ext
from grace_ext import ConfigError
from grace_ext.federated import Client, Fitted, Pace, Server


def test_a_budget_is_half_of_what_goes_through_in_the_time_that_computing_leaves():
    pace = Pace(2.0, window=3)
    assert pace.budget is None and pace.bandwidth is None
    for elapsed in (1.5, 1.5, 40.0):  # one that was disturbed
        pace.add(1000, elapsed, 0.5)
    assert pace.bandwidth == pytest.approx(1000) and pace.budget == pytest.approx(1000 * 1.5 / 2)


@pytest.mark.parametrize("computing, budget", [(math.nan, 500), (-5.0, 500), (0.0, 500), (0.5, 500)])
def test_what_a_client_says_is_believed_within_bounds(computing, budget):
    pace = Pace(1.0)
    pace.add(1000, 1.0, computing)
    assert pace.budget == pytest.approx(budget)


def test_who_says_that_all_was_computing_has_told_nothing_of_the_link():
    pace = Pace(1.0)
    pace.add(1000, 1.0, 10.0)
    assert pace.budget is None
    pace.add(1000, 4.0, 3.0)
    pace.add(1000, 4.0, 3.0)
    assert pace.budget == 0


def test_who_misses_rounds_gets_less_and_less_until_it_comes():
    pace = Pace(1.0)
    pace.missed(300, 3.0)
    assert pace.budget == 50
    for _ in range(5):
        pace.add(1000, 1.5, 0.5)
    assert pace.budget == 250
    for expected in (125, 62.5):
        pace.missed(300, 3.0)
        assert pace.budget == expected
    pace.add(40, 0.9, 0.5)
    assert pace.budget == pytest.approx(25)


@pytest.mark.parametrize("seconds", [0.0, -1.0, math.nan, math.inf])
def test_a_pace_is_a_time(seconds):
    with pytest.raises(ConfigError, match="seconds"):
        Pace(seconds)


@pytest.mark.parametrize("spec", ["topk:0.1/rice/qsgd:7", "topk:0.02/rice/raw", "dr-bf-p0-qsgd:0.05"])
def test_messages_are_as_long_as_the_budget_allows(spec):
    d = 50_000
    fitted, vector = Fitted(grace_ext.compressor(spec), d), np.random.default_rng(0).standard_normal(d).astype(np.float32)
    assert str(fitted.at(5000.0)) == str(grace_ext.compressor(spec)), "nothing is known of its sizes yet"
    for budget in (20_000, 2000, 9000, 4000):
        for _ in range(3):
            nbytes = fitted.at(budget).compress(vector).size
            fitted.sent(nbytes)
        assert nbytes == pytest.approx(budget, rel=0.1)
    before = str(fitted.at(4000.0))
    fitted.sent(fitted.at(4000.0).compress(np.zeros(d, np.float32)).size)
    assert str(fitted.at(4000.0)) == before, "an empty container tells nothing of what full ones take"
    assert fitted.at(0.0).sparsifier.density == pytest.approx(1e-4) and fitted.at(1e9).sparsifier.density == 1.0


@pytest.mark.parametrize("spec", ["dense/fp16", "powersgd:4"])
def test_what_has_no_density_is_refused(spec):
    with pytest.raises(ConfigError, match="density"):
        Fitted(grace_ext.compressor(spec), 10)


def test_over_a_link_that_changes_rounds_take_the_time_that_they_are_given():
    """A server and a client with memory ef21, over a virtual link; computing takes 0.2 s of 1 s."""
    d, seconds, computing = 40_000, 1.0, 0.2
    random = np.random.default_rng(0)
    start, target = (random.standard_normal(d).astype(np.float32) for _ in range(2))
    spec = grace_ext.compressor("topk:0.05/rice/qsgd:7")
    server = Server(start, 1, spec, memory="ef21", norm_limit=1e9)
    client, pace = Client(start, spec, memory="ef21"), Pace(seconds, window=3)
    down, up = Fitted(spec, d), Fitted(spec, d)
    for rate in (1e5, 1e4, 5e4):  # bytes per second
        elapsed = []
        for _ in range(10):
            server.begin_round(down.at(pace.budget))
            down.sent(server.told_bytes)
            told = server.message_for(0)
            model = client.receive(told)
            update = client.update(model - 0.3 * (model - target) - 0.1 * random.standard_normal(d), 1.0, up.at(pace.budget))
            up.sent(update.size)
            server.receive(0, update)
            server.end_round()
            elapsed.append(computing + (told.size + update.size) / rate)
            pace.add(told.size + update.size, elapsed[-1], computing)
        assert elapsed[4:] == pytest.approx([seconds] * 6, rel=0.1), rate
