"""The kernels of memory `adam` against numpy."""

import numpy as np
import pytest
from support.arrays import gauss, same_bits
from support.reference_kernels import random32

from grace_ext.kernels._sums import SKETCH_BLOCK, SKETCH_SUMS
from grace_ext.kernels.second_moment import (
    LANES,
    factored_step,
    largest_in_rows,
    largest_in_rows_at,
    random_sketch,
    root_moments,
    square_sums,
    square_sums_at,
    update_moments,
)


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


@pytest.mark.parametrize("blocks", [1, 2, 3, 128, 129, 256, 257, 700])
def test_blocks_of_a_sketch_are_summed_in_a_fixed_order(blocks):
    """Block b in sum b % SKETCH_SUMS, and then the second half of the sums is added to the first. An accelerator does the same."""
    values = gauss(blocks * SKETCH_BLOCK + 3, 2)
    rows = [block_sketch(values[i * SKETCH_BLOCK : (i + 1) * SKETCH_BLOCK], i) for i in range(blocks)]
    sums = np.zeros((SKETCH_SUMS, LANES), np.float32)
    for i, row in enumerate(rows):
        sums[i % SKETCH_SUMS] += row
    while len(sums) > 1:
        sums = sums[: len(sums) // 2] + sums[len(sums) // 2 :]
    sign = -1 if random32(blocks, 5, 77) & 1 else 1
    sums[0, :3] += np.float32(sign) * values[-3:]
    assert same_bits(sketch(values, 5), sums[0])


def block_sketch(values, number):
    """The row of one block: four sums for each number, of the rows with the same remainder."""
    word = int(random32(number, 5, 77))
    signs = np.array([-1 if word >> i & 1 else 1 for i in range(SKETCH_BLOCK // LANES)], np.float32)
    signed = values.reshape(-1, 4, LANES) * signs.reshape(-1, 4, 1)
    fours = np.cumsum(signed, axis=0, dtype=np.float32)[-1]
    return (fours[0] + fours[1]) + (fours[2] + fours[3])


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


def roots_of_shares(moments, smoothing):
    shares = moments / moments.mean() if moments.any() else np.ones(moments.size)
    return np.sqrt((shares + smoothing) / (1 + smoothing))


SHAPES = np.array([(30, 10), (1, 200), (0, 7), (100, 1), (5, 5), (4, 0), (6, 150)])


def sums_of(vector):
    """The sums of squares of the rows and columns of all matrices, one after the other."""
    sums = []
    for part, (rows, columns) in zip(np.split(vector, np.cumsum(SHAPES.prod(axis=1))[:-1]), SHAPES, strict=True):
        sums.append(np.empty(rows + columns, np.float32))
        square_sums(part, sums[-1][:rows], sums[-1][rows:])
    return np.concatenate(sums)


def updated(vector, states, squares=None, beta2=0.75, smoothing=0.5):
    """What update_moments and largest_in_rows write: the new states by matrix, and the rest."""
    squares = np.arange(1, len(SHAPES) + 1, dtype=np.float32) if squares is None else squares
    finite, relative, values = np.empty(len(SHAPES), np.bool_), np.empty(len(SHAPES)), np.empty(len(SHAPES), np.float32)
    rows, positions = np.empty((2, len(SHAPES)), np.int64)
    update_moments(SHAPES, sums_of(vector), squares, beta2, smoothing, states, finite, rows, relative)
    largest_in_rows(vector, SHAPES, rows, positions, values)
    return np.split(states, np.cumsum(3 + SHAPES.sum(axis=1))[:-1]), finite, positions, values, relative


def test_moments_are_averages_and_what_arrived_is_described():
    vector, states = gauss(int(SHAPES.prod(axis=1).sum()), 1), np.abs(gauss(int((3 + SHAPES.sum(axis=1)).sum()), 2))
    vector[500:600] = 0  # the fourth matrix
    before = np.split(states.copy(), np.cumsum(3 + SHAPES.sum(axis=1))[:-1])
    after, finite, positions, values, relative = updated(vector, states)
    assert finite.all()
    start = 0
    for i, (rows, columns) in enumerate(SHAPES):
        matrix = vector[start : start + rows * columns].reshape(rows, columns).astype(float)
        start += rows * columns
        square = np.square(matrix)
        new = np.concatenate([[i + 1, 1, before[i][2]], square.sum(axis=1), square.sum(axis=0)])
        expected = 0.75 * before[i] + 0.25 * new
        expected[2] = before[i][2]  # the learning rate
        np.testing.assert_allclose(after[i], expected, rtol=1e-5)
        if not square.any():
            assert positions[i] == 0 and values[i] == 0 and relative[i] == 0
            continue
        row = square.sum(axis=1).argmax()
        assert positions[i] == row * columns + square[row].argmax() and values[i] == matrix.flat[positions[i]]
        shares = [np.square(roots_of_shares(sums, 0.5)) for sums in np.split(expected[3:], [rows])]
        product = np.outer(square.sum(axis=1), square.sum(axis=0)) / square.sum()
        assert relative[i] == pytest.approx((product / np.outer(*shares)).mean(), rel=1e-4)


def test_moments_that_are_not_finite_are_named():
    vector = gauss(int(SHAPES.prod(axis=1).sum()), 1)
    vector[3], squares = 3e38, np.ones(len(SHAPES), np.float32)
    squares[3] = np.inf
    _, finite, _, _, _ = updated(vector, np.zeros(int((3 + SHAPES.sum(axis=1)).sum()), np.float32), squares)
    assert finite.tolist() == [False, True, True, False, True, True, True]


@pytest.mark.parametrize("density", [0, 0.02, 0.3, 1])
def test_a_sparse_vector_gives_the_same_bits(density):
    vector = gauss(int(SHAPES.prod(axis=1).sum()), 7)
    vector[np.random.default_rng(1).random(vector.size) >= density] = 0
    at = np.flatnonzero(vector).astype(np.uint32)
    expected = sums_of(vector)
    sums = np.full_like(expected, np.nan)
    square_sums_at(at, vector[at], SHAPES, sums)
    assert same_bits(sums, expected)
    rows = np.array([29, 0, -1, 50, 2, -1, 5])
    (dense_positions, positions), (dense_values, values) = np.empty((2, 7), np.int64), np.empty((2, 7), np.float32)
    largest_in_rows(vector, SHAPES, rows, dense_positions, dense_values)
    largest_in_rows_at(at, vector[at], SHAPES, rows, positions, values)
    assert np.array_equal(positions, dense_positions) and same_bits(values, dense_values)


@pytest.mark.parametrize("clipped", [1, 0.25, -1, 0])
def test_roots_of_moments(clipped):
    rows, state = 3, np.array([4, 0.5, 7, 0, 1, 3, 2, 2], np.float32)
    moment = 4 + (clipped**2 - 1) * 2
    update = abs(clipped) * np.sqrt(30) / np.sqrt(moment / 0.5)
    found = np.empty(5, np.float32)
    root_moments(state, rows, clipped, 30.0, 2, 2, 0.5, 0.75, found)
    expected = [
        roots_of_shares(state[3:6], 0.5) * np.sqrt(moment / 0.5) * max(1, update / 0.75),
        roots_of_shares(state[6:], 0.5),
    ]
    np.testing.assert_allclose(found, np.concatenate(expected), rtol=1e-6)
    assert state.tolist() == [moment, 0.5, 7, 0, 1, 3, 2, 2]


def test_what_clipping_left_of_a_huge_gradient_does_not_spoil_the_moment():
    state = np.array([0.95 + 0.05e10, 1, 0, 1, 1, 1, 1], np.float32)  # in which 0.95 is lost
    root_moments(state, 2, 1e-5, 1.0, 0.95, 0.05e10, 0.5, 1e9, np.empty(4, np.float32))
    assert state[0] == pytest.approx(1.0)


def test_roots_of_nothing():
    found = np.empty(5, np.float32)
    root_moments(np.array([0, 0.5, 0, 0, 0, 0, 0, 0], np.float32), 3, 1, 0.0, 0, 0, 0.5, 1, found)
    assert same_bits(found, np.array([0, 0, 0, 1, 1], np.float32))


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
