"""The kernels of memory `adam` against numpy."""

import numpy as np
import pytest
from support.arrays import gauss, same_bits
from support.reference_kernels import random32

from grace_ext.kernels.second_moment import LANES, factored_step, random_sketch, spread_root, square_sums, sum_over_squares


def sketch_reference(values, low, high):
    rows = -(-values.size // LANES)
    signs = np.array([1.0 - 2 * (random32(i // 32, low, high) >> i % 32 & 1) for i in range(rows)])
    padded = np.zeros(rows * LANES)
    padded[: values.size] = values
    return (padded.reshape(rows, LANES) * signs[:, None]).sum(axis=0)


def sketch(values, key):
    found = np.full(LANES, np.nan, np.float32)
    random_sketch(values, np.uint32(key), np.uint32(77), found)
    return found


@pytest.mark.parametrize("size", [0, 1, 7, 8, 9, 255, 256, 257, 3001])
def test_a_sketch_is_a_sum_with_random_signs(size):
    values = gauss(size, 1)
    np.testing.assert_allclose(sketch(values, 5), sketch_reference(values, 5, 77), rtol=1e-4, atol=1e-4)


def test_sketches_of_parts_add_up_and_tell_the_norm_of_the_sum():
    parts = [gauss(4003, seed) for seed in range(3)]
    total = np.sum(parts, axis=0)
    summed = [np.sum([sketch(part, key) for part in parts], axis=0) for key in range(400)]
    np.testing.assert_allclose(summed[0], sketch(total, 0), rtol=1e-3, atol=1e-3)
    estimates = np.square(summed).sum(axis=1) / np.square(total).sum()
    # Each has a standard deviation of sqrt(2 / 8); the mean of 400 one of 0.025.
    assert abs(estimates.mean() - 1) < 0.125


@pytest.mark.parametrize("rows, columns", [(1, 1), (1, 40), (40, 1), (7, 5), (33, 48), (9, 64), (5, 397), (3, 0), (0, 0)])
def test_sums_of_squares_by_row_and_column(rows, columns):
    values = gauss(rows * columns, 3)
    found = np.full(rows + columns, np.nan, np.float32)
    square_sums(values, found[:rows], found[rows:])
    square = np.square(values.astype(float)).reshape(rows, columns)
    np.testing.assert_allclose(found, np.concatenate([square.sum(axis=1), square.sum(axis=0)]), rtol=1e-5)


def test_sum_over_squares():
    values, roots = np.abs(gauss(100)), np.abs(gauss(100, 1)) + np.float32(0.1)
    assert sum_over_squares(values, roots) == pytest.approx((values / np.square(roots.astype(float))).sum())


def test_roots_of_shares():
    moments = np.array([0, 1, 3], np.float32)
    roots = np.empty(3, np.float32)
    spread_root(moments, np.float32(0.5), roots)
    np.testing.assert_allclose(np.square(roots) * 1.5, [0.5, 1.25, 2.75], rtol=1e-6)
    spread_root(np.zeros(3, np.float32), np.float32(0.5), roots)
    assert same_bits(roots, np.ones(3, np.float32))


@pytest.mark.parametrize("rows, columns", [(1, 1), (1, 40), (40, 1), (7, 5), (33, 48), (5, 397), (3, 0), (0, 0)])
@pytest.mark.parametrize("shrink", [1, 0.75])
def test_a_step(rows, columns, shrink):
    parameters, gradient = gauss(rows * columns, 1), gauss(rows * columns, 2)
    gradient[gauss(rows * columns // 64 + 1, 5).repeat(64)[: gradient.size] < 0] = 0  # stretches of zeros, and others
    gradient[::7] = -0.0
    by_row, by_column = np.abs(gauss(rows, 3)), np.abs(gauss(columns, 4))
    by_row[:1] = np.inf  # nothing has arrived
    eps, value, shrink = (np.float32(number) for number in (1e-3, -0.125, shrink))
    expected = shrink * parameters + value * gradient / (by_row[:, None] * by_column + eps).reshape(-1)
    factored_step(parameters, gradient, by_row, by_column, eps, value, shrink)
    assert same_bits(parameters, expected)


def test_a_step_that_is_not_finite():
    parameters, one = np.ones(3, np.float32), np.float32(1)
    factored_step(
        parameters, np.array([np.inf, np.nan, 0], np.float32), np.ones(1, np.float32), np.ones(3, np.float32), one, one, one
    )
    assert parameters[0] == np.inf and np.isnan(parameters[1]) and parameters[2] == 1, "as in torch"
