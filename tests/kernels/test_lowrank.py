"""The low-rank kernels against slow reference implementations, to the bit: all ranks must compute the same on any CPU."""

import numpy as np
import pytest
from support.arrays import gauss, same_bits
from support.reference_kernels import lowrank as reference_lowrank

from grace_ext._util.rng import Stream
from grace_ext.kernels.lowrank import add_magnitude, expand, orthonormalize

KEY = (np.uint32(0x12345678), np.uint32(0x9ABCDEF0))


def awkward_rows():
    g = gauss(400).reshape(4, 100)
    twice = g.copy()
    twice[2] = twice[0]
    twice[3] = 2 * twice[1] - twice[0]
    return {
        "random": g,
        "zero": 0 * g,
        "a zero row": g * np.float32([[1], [0], [1], [1]]),
        "dependent": twice,
        "large": g * np.float32(5e37),
        "subnormal": np.float32(1e-42) * np.sign(g) * np.arange(1, 101, dtype=np.float32),
        "nearly dependent": g[:1] + np.float32(1e-6) * g,
        "square": gauss(25).reshape(5, 5),
        "one": np.float32([[-3]]),
        "one zero": np.float32([[0]]),
        "one row": gauss(7)[None],
        "full square": np.zeros((4, 4), np.float32),
    }


@pytest.mark.parametrize("name", awkward_rows())
def test_orthonormalize(name):
    given = awkward_rows()[name].astype(np.float32)
    rows = given.copy()
    orthonormalize(rows, *KEY)
    np.testing.assert_allclose(rows.astype(float) @ rows.T.astype(float), np.eye(len(rows)), atol=1e-6)
    assert same_bits(rows, reference_lowrank.orthonormalize(given, *map(int, KEY)))
    again = given.copy()
    orthonormalize(again, *KEY)
    assert same_bits(again, rows)
    if name in ("random", "large", "nearly dependent", "square"):  # the same span as before
        kept = given.astype(float) @ rows.T.astype(float) @ rows
        np.testing.assert_allclose(kept, given, rtol=0, atol=1e-5 * np.abs(given).max())


def test_random_rows_depend_on_the_key_and_are_nearly_normal():
    rows, other = np.zeros((1, 100_000), np.float32), np.zeros((1, 100_000), np.float32)
    orthonormalize(rows, *Stream(name="w").key())
    orthonormalize(other, *Stream(name="w", step=1).key())
    assert abs(rows[0] @ other[0]) < 5 / np.sqrt(100_000)
    scaled = rows[0].astype(float) * np.sqrt(100_000)
    assert abs(scaled.mean()) < 5 / np.sqrt(100_000)
    # Four uniform numbers: the kurtosis is 3 - 6/5/4 = 2.7.
    assert abs((scaled**4).mean() - 2.7) < 0.1
    assert abs((np.abs(scaled) < 1).mean() - 0.68) < 0.02


@pytest.mark.parametrize(
    "r, n, m", [(1, 1, 1), (1, 5, 3), (2, 3, 1025), (3, 2, 1024), (4, 7, 100), (5, 3, 2500), (9, 40, 30)]
)
def test_expand(r, n, m):
    pt, qt, start = gauss(r * n, 1).reshape(r, n), gauss(r * m, 2).reshape(r, m), gauss(n * m, 3)
    own = gauss(r * m, 4).reshape(r, m)
    product, error = reference_lowrank.expand(pt, qt).reshape(-1), start - reference_lowrank.expand(pt, own).reshape(-1)
    weight = np.float32(1 / 3)
    for keep in (True, False):
        out, matrix = np.full(n * m, np.nan, np.float32), start.copy()
        largest = expand(pt, qt, weight, out, own, matrix if keep else matrix[:0])
        assert same_bits(out, product * weight)
        assert same_bits(matrix, error if keep else start)
        assert largest == np.abs(out).max().view(np.uint32)


def test_expand_tells_of_an_overflow_and_keeps_the_residual_finite():
    pt, qt = np.ones((1, 1), np.float32), np.float32([[3e38, 1, 2]])
    out, matrix = np.empty(3, np.float32), np.float32([-3e38, 5, 7])
    assert expand(pt, qt, np.float32(2), out, qt, matrix) >= 0x7F800000
    assert np.isinf(out[0]) and matrix.tolist() == [0, 4, 5]


def test_add_magnitude():
    for bad, least in ((1, 0), (np.nan, 0x7F800001), (np.inf, 0x7F800000), (-np.inf, 0x7F800000)):
        gradient, residual = gauss(101, 1), gauss(101, 2)
        gradient[77] = bad
        expected = gradient + residual
        assert add_magnitude(gradient, residual) >= least
        assert np.array_equal(gradient, expected, equal_nan=True)
    gradient = np.float32([1, -3, 2])
    assert add_magnitude(gradient, np.float32([0, -0.5, 0])) == np.float32(3.5).view(np.uint32)
