"""The kernels of memory `adam` against numpy."""

import numpy as np
import pytest
from support.arrays import gauss, same_bits
from support.reference_kernels import random32

from grace_ext.kernels.second_moment import LANES, accumulate_and_sketch, add_squares, spread_root, sum_ratio_squares


def sketch_reference(values, low, high):
    rows = -(-values.size // LANES)
    signs = np.array([1.0 - 2 * (random32(i // 32, low, high) >> i % 32 & 1) for i in range(rows)])
    padded = np.zeros(rows * LANES)
    padded[: values.size] = values
    return (padded.reshape(rows, LANES) * signs[:, None]).sum(axis=0)


def sketch(values, key):
    found, velocity, following = np.full(LANES, np.nan, np.float32), gauss(values.size, 9), np.empty_like(values)
    share, momentum = np.float32(0.25), np.float32(0.5)
    accumulate_and_sketch(velocity, values, momentum, share, following, np.uint32(key), np.uint32(77), found, False)
    np.testing.assert_allclose(following, momentum * velocity + share * values, rtol=1e-6, atol=1e-7)
    for shift in (0, 5):  # past the caches, from and to any address
        room, again = np.full(values.size + 40, np.nan, np.float32), np.empty_like(found)
        part = room[shift : shift + values.size]
        accumulate_and_sketch(velocity, values, momentum, share, part, np.uint32(key), np.uint32(77), again, True)
        assert same_bits(part, following) and same_bits(again, found)
        assert np.isnan(room[:shift]).all() and np.isnan(room[shift + values.size :]).all()
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


def sparse(rows, columns, density):
    values = gauss(rows * columns, 3)
    values[gauss(values.size, 4) > 3 * (0.5 - density)] = 0
    return values


@pytest.mark.parametrize("rows, columns", [(1, 1), (1, 40), (40, 1), (7, 5), (33, 48), (9, 64), (5, 397)])
def test_sums_of_squares_by_row_and_column(rows, columns):
    values = sparse(rows, columns, 0.1)
    before = np.abs(gauss(rows + columns, 5))
    found = before.copy()
    largest = add_squares(values, np.float32(0.9), found[:rows], found[rows:])
    square = np.square(values.astype(float)).reshape(rows, columns)
    expected = 0.9 * before + 0.1 * np.concatenate([square.sum(axis=1), square.sum(axis=0)])
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    assert largest == (np.argmax(np.abs(values)) if values.any() else -1)
    ratios = values.reshape(rows, columns) / np.outer(before[:rows], before[rows:])
    assert sum_ratio_squares(values, before[:rows], before[rows:]) == pytest.approx(np.square(ratios).sum(), rel=1e-4)


def test_nothing_has_no_largest_square():
    rows, columns = np.ones(3, np.float32), np.ones(0, np.float32)
    assert add_squares(np.zeros(0, np.float32), np.float32(0.5), rows, columns) == -1
    assert rows.tolist() == [0.5] * 3


def test_roots_of_shares():
    moments = np.array([0, 1, 3], np.float32)
    roots = np.empty(3, np.float32)
    spread_root(moments, np.float32(0.5), roots)
    np.testing.assert_allclose(np.square(roots) * 1.5, [0.5, 1.25, 2.75], rtol=1e-6)
    spread_root(np.zeros(3, np.float32), np.float32(0.5), roots)
    assert same_bits(roots, np.ones(3, np.float32))
