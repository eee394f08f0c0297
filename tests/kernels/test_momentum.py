"""The momentum kernels against numpy."""

import numpy as np
import pytest
from support.arrays import gauss, same_bits

from grace_ext.kernels.momentum import accumulate_momentum, accumulate_nesterov, hold_back


@pytest.mark.parametrize("share", [1.0, 0.3])
def test_momentum_kernels(share):
    velocity, given = gauss(1000, 1), gauss(1000, 2)
    m, c = np.float32(0.9), np.float32(share)
    following, out = np.empty_like(velocity), np.empty_like(velocity)
    accumulate_momentum(velocity, given, m, c, following)
    np.testing.assert_allclose(following, m * velocity + c * given, rtol=1e-6, atol=1e-7)
    in_place = velocity.copy()
    accumulate_momentum(in_place, given, m, c, in_place)
    assert same_bits(in_place, following)
    accumulate_nesterov(velocity, given, m, c, following, out)
    np.testing.assert_allclose(following, m * (velocity + c * given), rtol=1e-6, atol=1e-7)
    np.testing.assert_allclose(out, following + c * given, rtol=1e-6, atol=1e-7)
    replaced = given.copy()
    accumulate_nesterov(velocity, replaced, m, c, following, replaced)
    assert same_bits(replaced, out)
    empty = np.empty(0, np.float32)
    accumulate_momentum(empty, empty, m, c, empty)


def test_what_is_held_back_is_a_moving_average_and_loses_nothing():
    held, average = np.zeros(1000, np.float32), np.zeros(1000)
    given, sent = np.zeros(1000), np.zeros(1000)
    for i, share in enumerate((0.9, 0.9, 0.9, 0.5, 0.0)):
        gradient, following, out = gauss(1000, i), np.empty_like(held), np.empty_like(held)
        hold_back(held, gradient, np.float32(share), following, out)
        average = 0.9 * average + 0.1 * gradient
        if share == 0.9:
            np.testing.assert_allclose(out, average, rtol=1e-4, atol=1e-6)
        in_place = gradient.copy()
        hold_back(held, in_place, np.float32(share), held, in_place)
        assert same_bits(in_place, out) and same_bits(held, following)
        given, sent = given + gradient, sent + out
        np.testing.assert_allclose(sent + held, given, atol=1e-5)
    assert not held.any()
