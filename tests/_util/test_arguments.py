"""Checks of what callers give."""

import math
import warnings

import numpy as np
import pytest

from grace_ext import ConfigError
from grace_ext._util.arguments import checked_factor, checked_integer, checked_text


@pytest.mark.parametrize("number", [0, -(2**63), 2**63 - 1, np.int8(-3), np.uint64(7), np.array(5), True])
def test_integers(number):
    found = checked_integer("step", number)
    assert found == number and type(found) is int


@pytest.mark.parametrize(
    "wrong", [2**63, -(2**63) - 1, np.uint64(2**63), 1.5, 1.0, np.float32(3), "3", b"3", None, math.nan, [1]]
)
def test_what_is_no_integer_of_64_bits(wrong):
    with pytest.raises(ConfigError, match="step=.*; allowed: integers of 64 bits"):
        checked_integer("step", wrong)


def test_texts():
    assert checked_text("name", "\ud800") == "\ud800" and checked_text("name", "") == ""
    for wrong in (None, b"a", 5):
        with pytest.raises(ConfigError, match="name=.*; allowed: a str"):
            checked_text("name", wrong)


@pytest.mark.parametrize(
    "factor", [0, -1, 0.3, np.float64(0.5), np.array(0.5), 1e-50, True, np.float64(np.finfo(np.float32).max)]
)
def test_factors(factor):
    found = checked_factor("weight", factor)
    assert type(found) is np.float32 and found == np.float32(factor)


@pytest.mark.parametrize(
    "wrong", [None, "1", b"1", math.nan, -math.inf, 2.0**128 - 2.0**103, 1e300, 10**400, np.array([0.5]), [0.5], 1j]
)
def test_what_is_no_finite_number(wrong):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(ConfigError, match="weight=.*; allowed: numbers that are finite in float32"):
            checked_factor("weight", wrong)
