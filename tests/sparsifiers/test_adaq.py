"""adaq: the same share of both signs."""

import numpy as np
import pytest
from support.arrays import gauss
from support.selection import select

import grace_ext
from grace_ext import ConfigError


@pytest.mark.parametrize("density", [0.001, 0.05, 1.0])
def test_the_largest_of_each_sign(density):
    dense = gauss(30_000) + np.float32(0.7)
    found = select(f"adaq:{density}", dense)
    for sign in (1, -1):
        of_sign = np.flatnonzero(sign * dense > 0)
        largest = of_sign[np.argsort(-np.abs(dense[of_sign]), kind="stable")][: int(np.ceil(density * of_sign.size))]
        assert np.array_equal(np.sort(largest), found[sign * dense[found] > 0])


def test_one_sign_only_and_none():
    assert select("adaq:0.1", np.arange(1, 101, dtype=np.float32)).tolist() == list(range(90, 100))
    assert select("adaq:0.1", np.zeros(100, np.float32)).size == 0


def test_receivers_get_the_mean_of_each_sign():
    """Adaptive quantization: positions, and one mean for each sign."""
    gradient = gauss(5000)
    found = grace_ext.decompress(grace_ext.compressor("adaq:0.02/onebit:0").compress(gradient), 5000)
    chosen = select("adaq:0.02", gradient)
    values = gradient[chosen].astype(float)
    expected = np.zeros(5000)
    expected[chosen] = np.where(values < 0, values[values < 0].mean(), values[values > 0].mean())
    np.testing.assert_allclose(found, expected, rtol=1e-6)


def test_options_out_of_range():
    with pytest.raises(ConfigError, match="adaq: density=0"):
        grace_ext.compressor("adaq:0")
