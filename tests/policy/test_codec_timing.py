"""Curves through measured points, and codecs that are measured."""

import math

import numpy as np
import pytest
from support.arrays import gauss

import grace_ext
from grace_ext.policy.codec_timing import Curve, measure_codec, measure_reducible_codec


@pytest.mark.parametrize("x, y", [(1, 10), (0.1, 10), (100, 1000), (10, 100), (1000, 10_000)])
def test_a_curve_is_straight_in_logarithms_and_grows_after_the_last_point(x, y):
    assert math.isclose(Curve({1: 10, 100: 1000})(x), y)


def test_a_curve_that_does_not_grow_stays():
    assert math.isclose(Curve({1: 3, 4: 2}, grows=False)(1000), 2) and math.isclose(Curve({1: 3, 4: 2})(8), 4)


def test_a_codec_has_the_sizes_that_it_was_seen_to_have():
    compressor, gradients = grace_ext.compressor("topk:0.1/raw/raw"), [gauss(4000, seed) for seed in range(2)]
    codec = measure_codec(compressor, gradients, slices_of=(1, 4))
    size = compressor.compress(gradients[0]).size
    assert math.isclose(codec.size(4000, 1), size, rel_tol=0.01)
    assert codec.size(1000, 1) < codec.size(4000, 1) <= codec.size(4000, 2)
    assert codec.encode(4000) > 0 and 0 < codec.decode(4000, 1) < codec.decode(4000, 8)


def test_a_sum_of_halves_has_two_bytes_an_element():
    codec = measure_reducible_codec(grace_ext.compressor("dense/fp16"), gauss(3000), times=3)
    assert codec.size(3000, 1) == codec.size(3000, 5) == pytest.approx(2 * 3000, rel=0.01)
    assert np.isfinite([codec.encode(3000), codec.decode(3000, 1)]).all()
