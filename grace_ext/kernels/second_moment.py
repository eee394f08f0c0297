"""Kernels of memory `adam`: a sketch of squared norms, and the factored second moment of what arrived.

All sums are in a fixed order, so that ranks with other processors get the same bits.
"""

import numpy as np

from ._compile import kernel
from ._helpers import random32
from ._intrinsics import bits_of, helper, stream16
from ._sums import add_signed64, add_signed256

LANES = 8  # numbers of a sketch
_BLOCK = 256  # elements, in rows of 8: 32 signs


@kernel(
    "void(Array(float32, 1, 'C', readonly=True), Array(float32, 1, 'C', readonly=True), float32, float32, float32[::1],"
    " uint32, uint32, float32[::1], boolean)"
)
def accumulate_and_sketch(velocity, values, momentum, share, following, low, high, sketch, streamed):
    """following = momentum * velocity + share * values; sketch[j] = sum of values[8 i + j] with random signs s_i.

    velocity, values, following: float32[d]; sketch: float32[8], overwritten. The signs are the same for the same key
    (low, high). The sketch is linear in the values, and the expectation of sum(sketch**2) over the keys is sum(values**2)
    (Alon, Matias and Szegedy, The space complexity of approximating the frequency moments, STOC 1996, section 2.2).
    8 neighbors share a sign, since they go to different numbers. streamed: whether `following` is written past the caches.
    """
    sketch[:] = 0
    whole = values.size & ~(_BLOCK - 1)
    done = min((-(following.ctypes.data >> 2)) & 15, values.size) if streamed else 0  # up to a multiple of 64 bytes
    for i in range(done):
        following[i] = momentum * velocity[i] + share * values[i]
    tile = np.empty(_BLOCK, np.float32)
    for start in range(0, whole, _BLOCK):
        if done + _BLOCK <= values.size:
            before, added = velocity[done : done + _BLOCK], values[done : done + _BLOCK]
            after = following[done : done + _BLOCK]
            target = tile if streamed else after
            for i in range(_BLOCK):
                target[i] = momentum * before[i] + share * added[i]
            if streamed:
                for i in range(0, _BLOCK, 16):
                    stream16(tile, i, after, i)
            done += _BLOCK
        add_signed256(values, start, random32(np.uint32(start // _BLOCK), low, high), sketch)
    for i in range(done, values.size):
        following[i] = momentum * velocity[i] + share * values[i]
    word = random32(np.uint32(whole // _BLOCK), low, high)
    for i in range(whole, values.size):
        sign = np.float32(1) - np.float32(2) * np.float32(word >> np.uint32((i - whole) // LANES) & np.uint32(1))
        sketch[i % LANES] += sign * values[i]


@helper
def _sum(values, n, lanes):
    """The sum of values[:n], float32, in the order of this code on every processor. lanes: float32[8], overwritten."""
    lanes[:] = 0
    whole = n & ~63
    for at in range(0, whole, 64):
        add_signed64(values, at, np.uint32(0), lanes)
    for at in range(whole, n):
        lanes[at % LANES] += values[at]
    return ((lanes[0] + lanes[4]) + (lanes[1] + lanes[5])) + ((lanes[2] + lanes[6]) + (lanes[3] + lanes[7]))


@kernel("int64(Array(float32, 1, 'C', readonly=True), float32, float32[::1], float32[::1])")
def add_squares(values, decay, rows, columns):
    """rows = decay * rows + (1 - decay) * (sum of squares of each row), and the same for columns.

    values: float32[r * c], a matrix row by row; rows: float32[r]; columns: float32[c]. Returns the position of the largest
    square, the first of several, or -1 if all are zero.
    """
    share, width = np.float32(1) - decay, columns.size
    for j in range(width):
        columns[j] *= decay
    squares, lanes = np.empty(width, np.float32), np.empty(LANES, np.float32)
    bits = squares.view(np.uint32)  # for numbers that are not negative, their order is that of the numbers
    largest, where = np.uint32(0), np.int64(-1)
    for i in range(rows.size):
        row = values[i * width : (i + 1) * width]
        top = np.uint32(0)
        for j in range(width):
            squares[j] = share * (row[j] * row[j])
            columns[j] += squares[j]
        for j in range(width):
            top = max(top, bits[j])
        rows[i] = decay * rows[i] + _sum(squares, width, lanes)
        if top > largest:
            largest, where = top, np.int64(i)
    if where < 0:
        return where
    at = where * width
    while bits_of(share * (values[at] * values[at])) != largest:
        at += 1
    return at


@kernel(
    "float64(Array(float32, 1, 'C', readonly=True), Array(float32, 1, 'C', readonly=True),"
    " Array(float32, 1, 'C', readonly=True))"
)
def sum_ratio_squares(values, rows, columns):
    """Return the sum of (values[i, j] / (rows[i] * columns[j]))**2.

    values: float32[r * c], a matrix row by row; rows: float32[r] and columns: float32[c], not zero.
    """
    width = columns.size
    inverse, ratios, lanes = np.empty(width, np.float32), np.empty(width, np.float32), np.empty(LANES, np.float32)
    for j in range(width):
        inverse[j] = np.float32(1) / (columns[j] * columns[j])
    total = np.float64(0)
    for i in range(rows.size):
        row = values[i * width : (i + 1) * width]
        for j in range(width):
            ratios[j] = row[j] * row[j] * inverse[j]
        total += np.float64(_sum(ratios, width, lanes)) / np.float64(rows[i] * rows[i])
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
