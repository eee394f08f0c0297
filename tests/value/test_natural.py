"""natural: powers of two, as few bits as their exponents need."""

import numpy as np
from support.arrays import gauss
from support.value_sections import FLT_MAX, encoded


def test_natural_rounds_to_a_neighbouring_power_of_two():
    values = np.concatenate([gauss(5000), np.float32(2.0) ** np.arange(-60, 60)]).astype(np.float32)
    got = encoded("natural:8", values)[1]
    below = np.float32(2.0) ** np.floor(np.log2(abs(values)))
    kept = got != 0  # 8 bits reach from 2**59 down to 2**-66
    assert kept.all() and (np.sign(got) == np.sign(values)).all()
    assert ((abs(got) == below) | (abs(got) == 2 * below)).all()
    assert np.array_equal(got[5000:], values[5000:]), "powers of two stay as they are"
    low = np.array([1.0, 2.0**-20, 1e-30], np.float32)
    assert set(encoded("natural:3", np.tile(low, 1000))[1]) <= {1, 0.25, 0}


def test_natural_takes_as_few_bits_as_the_exponents_need():
    values = np.where(gauss(8000) < 0, -1, 1) * np.linspace(1, 3.9, 8000)  # 1, 2, 4 of both signs, and 0
    assert encoded("natural:8", values)[0].size == 2 + 1 + 3000
    assert encoded("natural:2", values)[0].size == 2 + 1 + 2000


def test_natural_never_rounds_to_infinity():
    got = encoded("natural:8", [FLT_MAX, -FLT_MAX, 2.0**127, 1e-45] * 100)[1]
    assert set(abs(got)) <= {2.0**127, 2.0, 0.0} and (abs(got[::4]) == 2.0**127).all()
