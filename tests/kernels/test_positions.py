"""Drawn positions against their reference implementation. test_cpus.py runs this file for other CPUs, too."""

import numpy as np
import pytest
from support.reference_kernels import sparse as reference_sparse
from support.selection_inputs import guarded

from grace_ext.kernels import draw_positions


@pytest.mark.parametrize(
    "k, d",
    [
        (1, 1),
        (1, 2),
        (2, 2),
        (1, 7),
        (6, 7),
        (7, 7),
        (3, 1000),
        (999, 1000),
        (1000, 1000),
        (1, 2**31 - 1),
        (5000, 2**31 - 1),
        (5000, 5001),
        (4096, 2**30),
    ],
)
def test_draw_positions(k, d):
    keys = np.random.default_rng(k).integers(0, 2**32, (20 if k < 100 else 2, 2)).tolist()
    for low, high in [(0, 0), (0xFFFFFFFF, 0xFFFFFFFF), *keys]:
        out = guarded(k)
        draw_positions(out[:k], d, low, high)
        assert (out[k:] == 0xA5A5A5A5).all()
        assert out[:k].tolist() == reference_sparse.draw_positions(k, d, low, high)
        assert (out[1:k] > out[: k - 1]).all() and out[k - 1] < d
