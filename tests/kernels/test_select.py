"""select_above, of topk.py, against its reference implementation; also run by test_cpus.py."""

import numpy as np
import pytest
from support.reference_kernels import sparse as reference_sparse
from support.selection_inputs import guarded

from grace_ext.kernels import NON_FINITE, select_above
from grace_ext.kernels.topk import MAGNITUDE, SLACK

SIZES = [0, 1, 2, 15, 16, 17, 31, 33, 4095, 4096, 4097, 8192, 12_289]


def gauss(d, seed=0):
    return np.random.default_rng(seed).standard_normal(d).astype(np.float32)


def run_above(values, bound, residual=None, out=None):
    fused = residual is not None
    room = values.size + SLACK
    positions, found = guarded(room), guarded(room)
    n = select_above(
        values,
        residual if fused else values,
        out if fused else np.empty(0, np.float32),
        fused,
        bound,
        positions[:room],
        found[:room],
    )
    assert (positions[room:] == 0xA5A5A5A5).all() and (found[room:] == 0xA5A5A5A5).all(), "written behind the end"
    return positions[:n], found[:n].view(np.float32)


@pytest.mark.parametrize("d", SIZES)
@pytest.mark.parametrize("bound", [0, 1, 0x3F800000, int(NON_FINITE), int(MAGNITUDE)])
def test_select_above(d, bound):
    values = gauss(d, d)
    values[::5] = 0
    values[3::50], values[7::90], values[8::90], values[11::70] = 1, np.nan, -np.inf, 1e-45
    bound = np.uint32(bound)
    expected = reference_sparse.above(values, bound)
    positions, found = run_above(values, bound)
    assert np.array_equal(positions, expected) and found.tobytes() == values[expected].tobytes()
    residual, gradient = gauss(d, 1), values.copy()
    total = gradient + residual
    expected = reference_sparse.above(total, bound)
    for out in (np.full_like(gradient, 9), gradient):  # the last one is in place
        positions, found = run_above(gradient, bound, residual, out)
        assert np.array_equal(positions, expected) and found.tobytes() == total[expected].tobytes()
        assert out.tobytes() == total.tobytes()
