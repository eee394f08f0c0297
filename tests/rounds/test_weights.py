"""Shares of weights."""

import math

import pytest

from grace_ext.rounds.weights import shares_of


def test_shares_are_the_weights_over_their_sum():
    assert shares_of({"a": 1.0, "b": 3.0}) == {"a": 0.25, "b": 0.75}
    assert shares_of({0: 0.0, 1: 2.0}) == {0: 0.0, 1: 1.0}


def test_nobody_counts_where_all_weights_are_zero():
    assert shares_of({0: 0.0, 1: 0.0}) == {0: 0.0, 1: 0.0} and shares_of({}) == {}


def test_the_largest_weights_do_not_overflow():
    assert math.fsum(shares_of(dict.fromkeys(range(3), 1.7e308)).values()) == pytest.approx(1)
