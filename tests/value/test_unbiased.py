"""terngrad and natural on average. Seeds are fixed; each bound says how likely other seeds would break it."""

import math

import numpy as np
import pytest
from support.arrays import gauss
from support.codec_conformance import decode

from grace_ext._util.rng import Stream
from grace_ext.pipeline import spec

STEPS, K = 300, 2048


def values_of(text):
    """float32[K]: normal, or of widely different magnitudes for a codec that follows those."""
    values = gauss(K, 11)
    spread = np.random.default_rng(5).integers(-12, 1, K) if text == "natural:8" else 0
    return np.ldexp(values, spread).astype(np.float32)


@pytest.fixture(scope="module", params=["terngrad", "terngrad:bucket=64", "natural:8", "natural:3"])
def sample(request):
    """(spec, values, STEPS decoded versions, the width of the interval that each value is rounded within)."""
    values, codec = values_of(request.param), spec.parse_stage("value", request.param)
    found = np.stack([decode(codec, values, Stream(0, "w", step, 0)) for step in range(STEPS)])
    if request.param.startswith("terngrad"):
        bucket = codec.bucket or K
        width = np.repeat(abs(values).reshape(-1, bucket).max(1), bucket).astype(float)
    else:
        floor = 2.0 ** np.floor(np.log2(abs(values)))
        width = np.maximum(floor, 2.0 ** (math.ceil(math.log2(abs(values).max())) - 2 ** (codec.bits - 1) + 2))
    return request.param, values.astype(float), found, width


def test_unbiased_at_every_value(sample):
    """Hoeffding: a value stays within its interval, so its mean is off by more with probability 1e-9 / K at most."""
    _, values, found, width = sample
    bound = width * math.sqrt(math.log(2 * K / 1e-9) / (2 * STEPS))
    assert (abs(found.mean(0) - values) <= bound).all()
    assert (abs(found - values) <= width).all()


def test_unbiased_over_all(sample):
    """Hoeffding over STEPS * K independent errors, in units of their widths: off by more with probability 1e-9 at most."""
    _, values, found, width = sample
    error = (np.sign(values) * (found - values) / width).mean()
    assert abs(error) <= math.sqrt(math.log(2 / 1e-9) / (2 * STEPS * K)) + 1e-6


def test_variance_of_rounding_up_or_down(sample):
    """width**2 p (1 - p), p the way up. The total is off by 5 % with probability < 1e-9."""
    _, values, found, width = sample
    p = np.modf(abs(values) / width)[0]
    expected = (width**2 * p * (1 - p)).sum()
    assert abs(((found - values) ** 2).sum(1).mean() / expected - 1) < 0.05


def test_natural_is_within_the_published_bound():
    """Horvath et al., Theorem 1: E |C(x) - x|^2 <= |x|^2 / 8; 4/3 of a power of two reaches it, within 1 % at 6 sigma."""
    codec, worst = spec.parse_stage("value", "natural:8"), np.full(K, 4 / 3, np.float32)
    for values in (values_of("natural:8"), gauss(K), worst):
        errors = [decode(codec, values, Stream(1, "w", step, 0)) - values for step in range(100)]
        share = np.mean([error @ error for error in errors]) / (values.astype(float) ** 2).sum()
        assert 0.99 < 8 * share < 1.01 if values is worst else 8 * share < 1


def test_terngrad_has_the_expected_square():
    """E |Q(v)|^2 = max |v| * |v|_1 in a bucket (Wen et al., equation 9 and after). Off by 3 % with probability < 1e-9."""
    values = gauss(K, 3)
    squares = [
        (decode(spec.parse_stage("value", "terngrad"), values, Stream(2, "w", step, 0)) ** 2).sum() for step in range(200)
    ]
    expected = float(abs(values).max()) * abs(values.astype(float)).sum()
    assert abs(np.mean(squares) / expected - 1) < 0.03


def test_small_chances_are_right():
    """A millionth of the largest is drawn with 1e-6, zeros never: 25 million draws; Poisson of 25, off by 25 < 1e-5."""
    values = np.full(5_000_000, 1e-6, np.float32)
    values[0], values[1::2] = 1, 0
    codec, drawn = spec.parse_stage("value", "terngrad"), 0
    for step in range(10):
        got = decode(codec, values, Stream(step=step))
        assert not got[1::2].any()
        drawn += np.count_nonzero(got[2::2])
    assert 5 <= drawn <= 50
