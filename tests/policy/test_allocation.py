"""Budgets over layers: kernels against reference implementations, error curves against sorting, the knapsack against trying all."""

import itertools

import numpy as np
import pytest

from grace_ext import ConfigError
from grace_ext.kernels.curves import BINS, LANES, SHIFT, knapsack, magnitude_histogram
from grace_ext.policy.allocation import DENSITIES, STEPS, ErrorCurve, counts_of, least_bytes, least_error


def layer(d, seed, scale=1.0):
    return (scale * np.random.default_rng(seed).standard_t(3, d)).astype(np.float32)


@pytest.mark.parametrize("compensated", [False, True])
@pytest.mark.parametrize("d", [0, 1, 3, 4, 5, 4097])
def test_the_histogram_counts_leading_bits(d, compensated):
    gradient, residual = layer(d, d), layer(d, d + 1)
    gradient[1::7] = 0
    gradient[2::9], gradient[3::11] = np.inf, np.nan
    expected = np.zeros(BINS, np.int64)
    for x in gradient + residual if compensated else gradient:
        expected[(int(np.float32(x).view(np.uint32)) & 0x7FFFFFFF) >> int(SHIFT)] += 1
    counts = np.zeros((LANES, BINS), np.int64)
    magnitude_histogram(gradient, residual, compensated, counts)
    np.testing.assert_array_equal(counts.sum(axis=0), expected)


def cheapest(weights, values, capacity):
    """All combinations: the least value, None if none fits."""
    totals = [
        sum(row[choice] for row, choice in zip(values, choices, strict=True))
        for choices in itertools.product(range(weights.shape[1]), repeat=len(weights))
        if sum(row[choice] for row, choice in zip(weights, choices, strict=True)) <= capacity
    ]
    return min(totals, default=None)


@pytest.mark.parametrize("seed", range(40))
def test_the_knapsack_finds_what_trying_all_finds(seed):
    random = np.random.default_rng(seed)
    rows, choices, capacity = random.integers(1, 5), random.integers(1, 6), int(random.integers(0, 30))
    weights, values = random.integers(0, 15, (rows, choices)), random.integers(0, 50, (rows, choices)).astype(float)
    best, taken, chosen = np.empty((2, capacity + 1)), np.empty((rows, capacity + 1), np.uint8), np.empty(rows, np.int64)
    expected = cheapest(weights, values, capacity)
    assert knapsack(weights, values, best, taken, chosen) == (expected is not None)
    if expected is not None:
        assert weights[range(rows), chosen].sum() <= capacity
        assert values[range(rows), chosen].sum() == expected


@pytest.mark.parametrize("d", [1, 10, 1000, 100_000])
def test_an_error_curve_is_that_of_sorting(d):
    gradient, residual = layer(d, 1), layer(d, 2, 0.5)
    gradient[d // 3 :: 5] = 0
    for curve, values in [(ErrorCurve(gradient), gradient), (ErrorCurve(gradient, residual), gradient + residual)]:
        squares = np.sort(np.square(values.astype(np.float64)))[::-1]
        ks = np.unique(np.concatenate([[0, 1, d], counts_of(d)])).astype(int)
        exact = np.array([squares[k:].sum() for k in ks])
        np.testing.assert_allclose(curve(ks), exact, atol=(0.07 if d < 100 else 0.01) * squares.sum())
        assert curve(d) == 0
        assert (np.diff(curve(ks)) <= 0).all()


def test_curves_of_special_gradients():
    assert ErrorCurve(np.zeros(5, np.float32))(np.array([0, 5])).tolist() == [0, 0]
    assert ErrorCurve(np.empty(0, np.float32))(0) == 0
    assert ErrorCurve(np.full(4, np.finfo(np.float32).max))(0) > 0
    for wrong in (np.nan, np.inf):
        with pytest.raises(ConfigError, match="finite"):
            ErrorCurve(np.array([1, wrong], np.float32))


def sizes_of(curves):
    return np.array([2.0 * counts_of(curve.size) + 40 for curve in curves])


def totals(curves, chosen):
    """Bytes and squared error."""
    rows, errors = np.arange(len(curves)), np.array([curve(counts_of(curve.size)) for curve in curves])
    return sizes_of(curves)[rows, chosen].sum(), errors[rows, chosen].sum()


@pytest.mark.parametrize("share", [0.02, 0.1, 0.5])
def test_least_error_is_that_of_trying_all(share):
    curves = [ErrorCurve(layer(d, d, scale)) for d, scale in [(1000, 1.0), (3000, 0.1), (200, 4.0)]]
    sizes = sizes_of(curves)
    budget = share * sizes[:, -1].sum()
    found = totals(curves, least_error(curves, sizes, budget))
    assert found[0] <= budget
    every = np.array(list(itertools.product(range(len(DENSITIES)), repeat=3))).T
    errors = sum(curve(counts_of(curve.size))[choices] for curve, choices in zip(curves, every, strict=True))
    bytes_ = sum(row[choices] for row, choices in zip(sizes, every, strict=True))
    rounding = 1 - len(curves) / STEPS
    assert found[1] <= errors[bytes_ <= budget * rounding].min() * (1 + 1e-9)
    bytes_found, error = totals(curves, least_bytes(curves, sizes, found[1]))
    assert error <= found[1] * (1 + 1e-9)
    assert bytes_found <= bytes_[errors <= found[1] * rounding].min() * (1 + 1e-9)


def test_layers_that_differ_get_other_densities():
    """At the same bytes, the error is a good deal less than with one density for all."""
    curves = [ErrorCurve(layer(20_000, seed, 10.0**-seed)) for seed in range(4)]
    sizes = sizes_of(curves)
    uniform = 48
    budget = sizes[:, uniform].sum()
    chosen = least_error(curves, sizes, budget)
    assert totals(curves, chosen)[1] < 0.85 * totals(curves, np.full(4, uniform))[1]
    assert chosen[0] > chosen[3]


def test_budgets_that_are_too_small_or_no_numbers():
    curves = [ErrorCurve(layer(1000, 1))]
    sizes = sizes_of(curves)
    for budget in (0, 1):
        assert least_error(curves, sizes, budget).tolist() == [0]
    assert least_bytes(curves, sizes, 0).tolist() == [len(DENSITIES) - 1]
    for budget in (-1, np.nan, np.inf):
        with pytest.raises(ConfigError, match="budget"):
            least_error(curves, sizes, budget)
    with pytest.raises(ConfigError, match="densities"):
        least_error(curves, sizes[:, 1:], 10)
    assert least_error([], np.empty((0, len(DENSITIES))), 10).size == 0
