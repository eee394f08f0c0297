"""Kernels of memory `adam`: a sketch of squared norms, the factored second moment of what arrived, and the step with it.

All sums are in a fixed order, so that ranks with other processors get the same bits.
"""

import numpy as np

from ._compile import kernel
from ._helpers import MAGNITUDE
from ._intrinsics import bits_of, helper, quotient
from ._sums import LANES, add_sketch, add_square_rows

_SKIPPED = 64  # elements that a step leaves alone together


@kernel("void(Array(float32, 1, 'C', readonly=True), uint32, uint32, float32[::1])")
def random_sketch(values, low, high, sketch):
    """sketch[j] = sum of values[8 i + j] with random signs s_i.

    values: float32[d]; sketch: float32[8], overwritten. The signs are the same for the same key (low, high). The sketch is
    linear in the values, and the expectation of sum(sketch**2) over the keys is sum(values**2) (Alon, Matias and Szegedy, The
    space complexity of approximating the frequency moments, STOC 1996, section 2.2). 8 neighbors share a sign, since they go
    to different numbers.
    """
    sketch[:] = 0
    add_sketch(values, 0, values.size, low, high, sketch)


@kernel("void(Array(float32, 1, 'C', readonly=True), float32[::1], float32[::1])")
def square_sums(values, rows, columns):
    """rows, columns = the sums of squares of each row and of each column.

    values: float32[r * c], a matrix row by row; rows: float32[r] and columns: float32[c], overwritten.
    """
    columns[:] = 0
    add_square_rows(values, rows, columns, np.empty(2 * LANES, np.float32))


@kernel("float64(Array(float32, 1, 'C', readonly=True), Array(float32, 1, 'C', readonly=True))")
def sum_over_squares(values, roots):
    """Return the sum of values / roots**2, both float32[n], the roots not zero."""
    total = np.float64(0)
    for i in range(values.size):
        total += np.float64(values[i]) / (np.float64(roots[i]) * np.float64(roots[i]))
    return total


@kernel("void(Array(float32, 1, 'C', readonly=True), float32, float32[::1])")
def spread_root(moments, smoothing, roots):
    """roots = sqrt((moments / mean(moments) + smoothing) / (1 + smoothing)); 1 where all moments are zero.

    moments and roots: float32[n].
    """
    total = np.float64(0)
    for i in range(moments.size):
        total += np.float64(moments[i])
    mean = np.float32(total / max(moments.size, 1))
    for i in range(moments.size):
        relative = moments[i] / mean if mean > 0 else np.float32(1)
        roots[i] = np.sqrt((relative + smoothing) / (np.float32(1) + smoothing))


@helper
def _are_zeros(values):
    """Whether all values are zeros, of either sign."""
    bits = np.uint32(0)
    for i in range(values.size):
        bits |= np.uint32(bits_of(values[i]) & MAGNITUDE)
    return bits == 0


@helper
def _step_row(p, g, scale, by_column, eps, value, shrink):
    for j in range(p.size):
        p[j] = shrink * p[j] + quotient(value * g[j], scale * by_column[j] + eps)


@kernel(
    "void(float32[::1], Array(float32, 1, 'C', readonly=True), Array(float32, 1, 'C', readonly=True),"
    " Array(float32, 1, 'C', readonly=True), float32, float32, float32)"
)
def factored_step(parameters, gradient, by_row, by_column, eps, value, shrink):
    """p = shrink * p + value * g / (by_row[i] * by_column[j] + eps), for p[i, j] in row-major order.

    parameters, gradient: float32[rows * columns]; by_row: float32[rows]; by_column: float32[columns]; eps > 0, all others at
    least 0 where they are not `value`. Where there is nothing to do, parameters are not touched.
    """
    columns = by_column.size
    width = _SKIPPED if shrink == 1 else max(columns, 1)
    for row in range(by_row.size):
        for start in range(0, columns, width):
            first, last = row * columns + start, row * columns + min(start + width, columns)
            if shrink != 1 or not _are_zeros(gradient[first:last]):
                part = by_column[start : start + last - first]
                _step_row(parameters[first:last], gradient[first:last], by_row[row], part, eps, value, shrink)
