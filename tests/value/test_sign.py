"""sign: one bit and a mean magnitude, or one bit alone."""

import numpy as np
import pytest
from support.arrays import gauss
from support.value_sections import FLT_MAX, encoded

import grace_ext
from grace_ext import ConfigError


@pytest.mark.parametrize("bucket", [0, 128])
def test_receivers_get_signs_times_the_mean_magnitude(bucket):
    values = gauss(1000) + np.float32(0.3)
    got = encoded(f"sign:bucket={bucket}", values)[1]
    for start in range(0, 1000, bucket or 1000):
        part = values[start : start + (bucket or 1000)].astype(float)
        expected = np.where(part < 0, -1, 1) * np.abs(part).mean()
        np.testing.assert_allclose(got[start : start + (bucket or 1000)], expected, rtol=1e-6)
    assert (encoded("sign", [FLT_MAX, -FLT_MAX] * 10)[1] == [FLT_MAX, -FLT_MAX] * 10).all()


def test_scale_one_sends_bare_signs_and_a_zero_is_positive():
    section, got = encoded("sign:one", [0.0, -0.0, -1e-41, 3.0, -2.0])
    assert got.tolist() == [1, 1, -1, 1, -1] and section.size == 2
    assert encoded("sign:one", gauss(100_000))[0].size == 1 + 12_500, "one bit for each value"


def test_a_single_sign_is_not_sent_as_the_value_itself():
    """A section longer than the raw values would be replaced by them."""
    compressor = grace_ext.compressor("dense/sign:one")
    assert grace_ext.decompress(compressor.compress(np.array([-3], np.float32)), 1).tolist() == [-1]


def test_efsignsgd_is_homogeneous_so_that_the_learning_rate_cancels_out():
    """GRACE compresses e + lr * g and divides by lr: with a residual in gradients' units that is the same."""
    residual, scaled = grace_ext.memory("residual"), np.zeros(512)
    compressor, rate = grace_ext.compressor("dense/sign"), 2.0**-4
    for step in range(5):
        gradient = gauss(512, step)
        compensated = residual.compensate("w", gradient)
        sent = grace_ext.decompress(compressor.compress(compensated), 512)
        residual.update("w", compensated, sent)
        total = scaled + rate * gradient.astype(float)
        update = np.where(total >= 0, 1, -1) * np.abs(total).mean()
        scaled = total - update
        np.testing.assert_allclose(sent, update / rate, rtol=1e-4)


def test_options_out_of_range():
    for spec, message in (("sign:two", "scale=two; allowed: mean, one"), ("sign:bucket=7", "sign: bucket=7")):
        with pytest.raises(ConfigError, match=message):
            grace_ext.compressor(f"dense/{spec}")
