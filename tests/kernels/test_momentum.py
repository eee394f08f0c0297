"""The momentum kernels against numpy."""

import numpy as np
import pytest
from support.arrays import gauss, same_bits

from grace_ext.kernels.momentum import accumulate_momentum, accumulate_nesterov


@pytest.mark.parametrize("share", [1.0, 0.3])
def test_momentum_kernels(share):
    velocity, given = gauss(1000, 1), gauss(1000, 2)
    m, c = np.float32(0.9), np.float32(share)
    following, replaced = np.empty_like(velocity), given.copy()
    accumulate_momentum(velocity, replaced, m, c, following)
    np.testing.assert_allclose(following, m * velocity + c * given, rtol=1e-6, atol=1e-7)
    assert same_bits(following, replaced)
    in_place = given.copy()
    accumulate_momentum(velocity, in_place, m, c, in_place)
    assert same_bits(in_place, following)
    replaced = given.copy()
    accumulate_nesterov(velocity, replaced, m, c, following)
    np.testing.assert_allclose(following, m * (velocity + c * given), rtol=1e-6, atol=1e-7)
    np.testing.assert_allclose(replaced, following + c * given, rtol=1e-6, atol=1e-7)
    empty = np.empty(0, np.float32)
    accumulate_momentum(empty, empty, m, c, empty)
