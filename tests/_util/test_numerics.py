"""What numpy may do without a warning."""

import warnings

import numpy as np
import pytest

from grace_ext._util.numerics import non_finite_allowed


def test_non_finite_values_and_overflow_give_no_warning():
    largest, infinite = np.float32([np.finfo(np.float32).max]), np.float32([np.inf])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with non_finite_allowed():
            assert np.isinf(largest + largest)
            assert np.isnan(infinite - infinite)
        with pytest.raises(RuntimeWarning):
            infinite - infinite
