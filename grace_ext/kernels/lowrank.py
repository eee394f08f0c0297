"""Orthonormal factors and their product, in a fixed order of operations: the same bits on every machine."""

import numpy as np

from ._compile import kernel
from ._helpers import MAGNITUDE, random32
from ._intrinsics import bits_of, helper

TILE = 1024  # number of floats of a row that stay in the L1 cache while they are summed
DEAD = 1e-24  # if less than this share of a row's square is left, it is rounding noise


@helper
def _dot(a, b):
    s0, s1, s2, s3 = 0.0, 0.0, 0.0, 0.0
    whole = a.size & -4
    for k in range(0, whole, 4):
        s0 += a[k] * b[k]
        s1 += a[k + 1] * b[k + 1]
        s2 += a[k + 2] * b[k + 2]
        s3 += a[k + 3] * b[k + 3]
    for k in range(whole, a.size):
        s0 += a[k] * b[k]
    return (s0 + s1) + (s2 + s3)


@helper
def _remove(work, i):
    """Subtract from row i what lies along the rows before it, which are orthonormal."""
    row = work[i]
    for j in range(i):
        other = work[j]
        along = _dot(other, row)
        for k in range(row.size):
            row[k] -= along * other[k]


@helper
def _draw(row, first, low, high):
    """Draw random integers, close to normally distributed (sums of four uniform ones), without the mathematics library."""
    for k in range(row.size):
        counter = np.uint32(2) * np.uint32(first + k)
        x, y = random32(counter, low, high), random32(counter + np.uint32(1), low, high)
        total = (x & np.uint32(0xFFFF)) + (x >> np.uint32(16)) + (y & np.uint32(0xFFFF)) + (y >> np.uint32(16))
        row[k] = np.float64(np.int64(total) - 131070)


@kernel("void(float32[:, ::1], uint32, uint32)")
def orthonormalize(rows, key_low, key_high):
    """Make the finite rows orthonormal in place, one after the other (Gram–Schmidt, twice each, in float64).

    rows: float32[r, n], r <= n. A row that is zero or lies in the span of those before is replaced by a random one.
    """
    r, n = rows.shape
    work = np.empty((r, n), np.float64)
    for i in range(r):
        row = work[i]
        row[:] = rows[i]
        for attempt in range(5):
            before = _dot(row, row)
            _remove(work, i)
            _remove(work, i)
            after = _dot(row, row)
            if after > DEAD * before:
                break
            _draw(row, (attempt * r + i) * n, key_low, key_high)
        scale = 1.0 / np.sqrt(after) if after > 0 else 0.0
        for k in range(n):
            row[k] *= scale
            rows[i, k] = np.float32(row[k])


@kernel("uint32(float32[::1], Array(float32, 1, 'C', readonly=True))")
def add_magnitude(gradient, residual):
    """gradient += residual; returns the bits of the largest magnitude of the sum."""
    largest = np.uint32(0)
    for i in range(gradient.size):
        gradient[i] += residual[i]
        x = np.uint32(bits_of(gradient[i]) & MAGNITUDE)
        largest = x if x > largest else largest
    return largest


@helper
def _row(pt, qt, i, start, tile):
    """tile = the elements from `start` on of row i of P·Qᵀ, summed from 0 over the rank in ascending order."""
    r, stop = pt.shape[0], start + tile.size
    tile[:] = np.float32(0)
    for j in range(0, r & -4, 4):
        p0, p1, p2, p3 = pt[j, i], pt[j + 1, i], pt[j + 2, i], pt[j + 3, i]
        q0, q1, q2, q3 = qt[j, start:stop], qt[j + 1, start:stop], qt[j + 2, start:stop], qt[j + 3, start:stop]
        for k in range(tile.size):
            tile[k] = (((tile[k] + p0 * q0[k]) + p1 * q1[k]) + p2 * q2[k]) + p3 * q3[k]
    for j in range(r & -4, r):
        p, q = pt[j, i], qt[j, start:stop]
        for k in range(tile.size):
            tile[k] += p * q[k]


@helper
def _scaled(tile, weight, out):
    largest = np.uint32(0)
    for k in range(tile.size):
        out[k] = tile[k] * weight
        x = np.uint32(bits_of(out[k]) & MAGNITUDE)
        largest = x if x > largest else largest
    return largest


@helper
def _subtract(tile, matrix):
    """Subtract; what would overflow becomes 0, because a residual that is not finite would stay so for ever."""
    for k in range(tile.size):
        error = matrix[k] - tile[k]
        finite = np.uint32(bits_of(error) & MAGNITUDE) < np.uint32(0x7F800000)
        matrix[k] = error if finite else np.float32(0)


@kernel("uint32(float32[:, ::1], float32[:, ::1], float32, float32[::1], float32[:, ::1], float32[::1])")
def expand(pt, qt, weight, out, own, matrix):
    """out = weight * P·Qᵀ, and matrix -= P·ownᵀ unless it is empty; returns the bits of out's largest magnitude.

    pt: float32[r, n], qt, own: float32[r, m], r >= 1; out, matrix: float32[n * m], written.
    """
    n, m = pt.shape[1], qt.shape[1]
    room = np.empty(TILE, np.float32)
    largest = np.uint32(0)
    for i in range(n):
        for start in range(0, m, TILE):
            stop = min(m, start + TILE)
            tile = room[: stop - start]
            _row(pt, qt, i, start, tile)
            largest = max(largest, _scaled(tile, weight, out[i * m + start : i * m + stop]))
            if matrix.size:
                _row(pt, own, i, start, tile)
                _subtract(tile, matrix[i * m + start : i * m + stop])
    return largest
