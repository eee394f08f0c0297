"""nonzero: it loses nothing."""

import numpy as np
from support.selection import select

import grace_ext


def test_nonzero_loses_nothing():
    dense = np.array([0, -0.0, 1e-45, 0, -3, 0, np.finfo(np.float32).max], np.float32)
    assert select("nonzero", dense).tolist() == [2, 4, 6]
    assert np.array_equal(grace_ext.decompress(grace_ext.compressor("nonzero").compress(dense), 7), dense)
