"""The kernel of LocalAdamW against its formula in float64."""

import numpy as np
import pytest
from support.arrays import gauss, same_bits
from support.reference_kernels.local_adamw import local_adamw_step as slow_step

from grace_ext.kernels.local_adamw import local_adamw_step

NUMBERS = {
    "share1": 0.1, "share": 0.4, "share2": 0.01, "square": 1.7, "unbias2": 5.0, "eps": 1e-3, "value": -0.02, "shrink": 0.99,
}  # fmt: skip


def arrays(rows, columns, one_moment=False):
    n = rows * columns
    moments = np.abs(gauss(rows, 5)), np.abs(gauss(1 if one_moment else columns, 6))
    return gauss(n, 1), gauss(n, 2), gauss(n, 3), gauss(n, 4), *moments


def step(given, step, **changed):
    """Make a step with copies of these arrays, and return all but the gradient."""
    own = [one.copy() for one in given]
    step(*own, **{name: np.float32(number) for name, number in {**NUMBERS, **changed}.items()})
    return own[:1] + own[2:]


def call(*args, **numbers):
    local_adamw_step(*args, *numbers.values())


@pytest.mark.parametrize("one_moment", [False, True])
@pytest.mark.parametrize("rows, columns", [(1, 1), (1, 40), (40, 1), (7, 5), (33, 64), (6, 200), (5, 397), (1, 1000)])
def test_a_step(rows, columns, one_moment):
    given = arrays(rows, columns, one_moment)
    for ours, expected in zip(step(given, call), step(given, slow_step), strict=True):
        np.testing.assert_allclose(ours, expected, rtol=1e-5, atol=1e-6)


def test_zeros_change_nothing():
    given = [np.zeros_like(one) for one in arrays(7, 5)]
    given[0][:] = 3
    assert all(same_bits(*pair) for pair in zip(step(given, call, shrink=1), given[:1] + given[2:], strict=True))


def test_no_elements():
    given = [np.empty(0, np.float32)] * 4 + [np.empty(0, np.float32), np.ones(3, np.float32)]
    assert step(given, call)[-1].tolist() == [1, 1, 1]


@pytest.mark.parametrize("wrong", [np.nan, np.inf])
def test_what_is_not_finite_reaches_its_row_and_column(wrong):
    given = arrays(6, 5)
    given[1][7] = wrong  # row 1, column 2
    found = step(given, call)
    assert not np.isfinite(found[1][7]) and not np.isfinite(found[3][1]) and not np.isfinite(found[4][2])
    assert np.isfinite(np.delete(found[3], 1)).all() and np.isfinite(np.delete(found[4], 2)).all()
    assert np.isnan(found[0][7])
