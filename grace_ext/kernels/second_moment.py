"""Kernels of memory `adam`: a sketch of squared norms, and the factored second moment of what arrived.

All sums are in a fixed order, so that ranks with other processors get the same bits.
"""

import numpy as np

from ._compile import kernel
from ._helpers import random32
from ._intrinsics import helper, mask16, trailing_zeros

LANES = 8  # numbers of a sketch


@kernel("void(Array(float32, 1, 'C', readonly=True), uint32, uint32, float32[::1])")
def sketch_norm(values, low, high, sketch):
    """sketch[j] = sum of values[8 i + j] with random signs s_i, the same for the same key (low, high).

    values: float32[d]; sketch: float32[8], overwritten. It is linear in the values, and the expectation of sum(sketch**2)
    over the keys is sum(values**2) (Alon, Matias and Szegedy, The space complexity of approximating the frequency moments,
    STOC 1996, section 2.2). 8 neighbors share a sign, since they go to different numbers.
    """
    a = b = c = d = e = f = g = h = np.float32(0)
    rows = values.size // 8
    word = np.uint32(0)
    for i in range(rows):
        if i & 31 == 0:
            word = random32(np.uint32(i >> 5), low, high)
        sign = np.float32(1) - np.float32(2) * np.float32(word & np.uint32(1))
        word >>= np.uint32(1)
        at = 8 * i
        a += sign * values[at]
        b += sign * values[at + 1]
        c += sign * values[at + 2]
        d += sign * values[at + 3]
        e += sign * values[at + 4]
        f += sign * values[at + 5]
        g += sign * values[at + 6]
        h += sign * values[at + 7]
    sketch[0], sketch[1], sketch[2], sketch[3] = a, b, c, d
    sketch[4], sketch[5], sketch[6], sketch[7] = e, f, g, h
    for j in range(values.size - 8 * rows):
        sketch[j] += values[8 * rows + j]


@helper
def _add_square(value, at, share, rows, columns):
    row = at // np.uint64(columns.size)
    square = share * (value * value)
    rows[row] += square
    columns[at - row * np.uint64(columns.size)] += square
    return square


@kernel("int64(Array(float32, 1, 'C', readonly=True), float32, float32[::1], float32[::1])")
def add_squares(values, decay, rows, columns):
    """rows = decay * rows + (1 - decay) * (sum of squares of each row), and the same for columns.

    values: float32[r * c], a matrix row by row, mostly zeros; rows: float32[r]; columns: float32[c]. Returns the position of
    the largest square, the first of several, or -1 if all are zero.
    """
    largest, position = np.float32(0), np.int64(-1)
    share = np.float32(1) - decay
    for i in range(rows.size):
        rows[i] *= decay
    for j in range(columns.size):
        columns[j] *= decay
    for start in range(0, values.size & ~15, 16):
        found = mask16(values, values, values, start, np.uint32(1))
        while found:
            at = np.uint64(start) + trailing_zeros(found)
            found &= found - np.uint64(1)
            square = _add_square(values[at], at, share, rows, columns)
            if square > largest:
                largest, position = square, np.int64(at)
    for at in range(values.size & ~15, values.size):
        square = _add_square(values[at], np.uint64(at), share, rows, columns)
        if square > largest:
            largest, position = square, np.int64(at)
    return position


@kernel(
    "float64(Array(float32, 1, 'C', readonly=True), Array(float32, 1, 'C', readonly=True),"
    " Array(float32, 1, 'C', readonly=True))"
)
def sum_ratio_squares(values, rows, columns):
    """Return the sum of (values[i, j] / (rows[i] * columns[j]))**2.

    values: float32[r * c], a matrix row by row, mostly zeros; rows: float32[r] and columns: float32[c], not zero.
    """
    total = np.float64(0)
    for start in range(0, values.size & ~15, 16):
        found = mask16(values, values, values, start, np.uint32(1))
        while found:
            at = np.uint64(start) + trailing_zeros(found)
            found &= found - np.uint64(1)
            row = at // np.uint64(columns.size)
            ratio = np.float64(values[at]) / np.float64(rows[row] * columns[at - row * np.uint64(columns.size)])
            total += ratio * ratio
    for i in range(values.size & ~15, values.size):
        at = np.uint64(i)
        row = at // np.uint64(columns.size)
        ratio = np.float64(values[at]) / np.float64(rows[row] * columns[at - row * np.uint64(columns.size)])
        total += ratio * ratio
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
