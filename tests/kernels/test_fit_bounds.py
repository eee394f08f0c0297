"""The kernels that fit sorted values stay inside their arrays."""

import numpy as np
from support.arrays import gauss
from support.fits import sketch, sort
from support.guards import survives

from grace_ext.kernels.dexp import evaluate_exponentials, fit_exponentials
from grace_ext.kernels.polyfit import evaluate_segments, find_knots, fit_segments
from grace_ext.kernels.sketch import look_up


def fits_in_fences(fence):
    good = True
    for k in (*range(1, 20), 255, 256, 257, 700):
        values = gauss(k, k)
        order, ordered, _ = sort(values, fence)
        good &= np.array_equal(ordered, values[order])
        magnitudes = fence(np.sort(np.abs(values)))
        ends = fence(np.zeros(5, np.int64))
        ends = fence(ends[: find_knots(magnitudes, 3, ends)])
        c = fence(np.zeros((ends.size, 6), np.float32).reshape(-1)).reshape(ends.size, 6)
        fit_segments(magnitudes, ends, c)
        edges, out = fence(np.zeros(ends.size + 1, np.float32)), fence(np.ones(k, np.float32))
        evaluate_segments(c, edges, ends, True, out)
        good &= not out.any()
        parameters = fence(np.zeros(4, np.float32))
        fit_exponentials(magnitudes, parameters)
        evaluate_exponentials(parameters, np.float32(0), np.float32(0), True, out)
        good &= not out.any()
        levels, table = sketch(values, 4, 16, fence)
        look_up(levels, fence(np.append(table, np.zeros(256 - table.size, np.float32))), out)
        good &= np.array_equal(np.sign(out), np.sign(values))
    return good


def test_kernels_stay_inside_their_arrays():
    fits_in_fences(np.copy)  # compiled here, not in the child
    assert survives(fits_in_fences)
