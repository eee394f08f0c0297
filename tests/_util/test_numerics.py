"""What numpy may do without a warning, and rounding."""

import math
import warnings

import numpy as np
import pytest

from grace_ext._util.numerics import non_finite_allowed, power_of_two


def test_non_finite_values_and_overflow_give_no_warning():
    largest, infinite = np.float32([np.finfo(np.float32).max]), np.float32([np.inf])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with non_finite_allowed():
            assert np.isinf(largest + largest)
            assert np.isnan(infinite - infinite)
        with pytest.raises(RuntimeWarning):
            infinite - infinite


def test_powers_of_two_are_not_above_the_number():
    assert [power_of_two(value) for value in (0.0, 0.3, 0.5, 1.0, 7.9, math.inf)] == [1.0, 0.25, 0.5, 1.0, 4.0, 1.0]
