"""What memories compute with arrays, where it is not as numpy does it."""

import numpy as np
import pytest

from grace_ext.memory.arrays import NumpyArrays


def test_clipping_is_a_factor_of_at_most_1():
    clipping, ones = NumpyArrays.clipping, np.ones(4, np.float32)
    assert clipping(ones, 1.0) == 0.5 and clipping(ones, 3.0) == 1.0 and clipping(ones * 0, 1.0) == 1.0
    assert clipping(ones * np.float32(1e30), 1.0) == pytest.approx(5e-31), "the squares overflow in float32"
    assert clipping(np.array([1, -np.inf], np.float32), 1.0) == 0.0
    assert clipping(np.array([np.nan], np.float32), 1.0) == 1.0
    assert clipping(np.empty(0, np.float32), 1.0) == 1.0


def test_the_norm_is_that_of_all_blocks():
    assert NumpyArrays.clipping(np.ones(150_000, np.float32), 1.0) == pytest.approx(150_000**-0.5, rel=1e-12)


def test_magnitudes_are_limited_to_deviations_of_the_array():
    array = np.array([-3, 1, 1, 1, 8], np.float32)
    limit = np.float32(0.5 * array.std(dtype=np.float64))
    NumpyArrays.clip(array, 0.5)
    assert array.tolist() == [-limit, 1, 1, 1, limit]
    NumpyArrays.clip(np.empty(0, np.float32), 0.5)


def test_roots_have_a_least_and_totals_are_of_float64():
    array = np.array([0, 4, 0.01], np.float32)
    NumpyArrays.to_root(array, 0.25)
    assert array.tolist() == [0.5, 2, 0.5]
    assert NumpyArrays.total(np.array([1e8, 1, 1], np.float32)) == 1e8 + 2
