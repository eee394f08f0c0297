"""The stable sort of float32 bit patterns against numpy's."""

import numpy as np
import pytest
from support.arrays import same_bits
from support.fits import CASES, sort


@pytest.mark.parametrize("name", CASES)
def test_argsort(name):
    values = CASES[name]
    order, ordered, count = sort(values)
    assert np.array_equal(order, np.argsort(values.view(np.uint32), kind="stable"))
    assert same_bits(ordered, values[order])
    assert count == np.count_nonzero(~np.signbit(values))


def test_argsort_of_keys_that_differ_in_one_digit():
    """A digit that is the same everywhere is left out."""
    for shift in (0, 11, 22, 5, 17):
        bits = np.random.default_rng(shift).integers(0, 1 << 10, 5000).astype(np.uint32) << np.uint32(shift)
        assert np.array_equal(sort(bits.view(np.float32))[0], np.argsort(bits, kind="stable"))
