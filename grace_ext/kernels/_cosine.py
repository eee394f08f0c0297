"""Cosine transforms of the columns of a matrix, and of squares: for kernels/dct.py.

Lee, A new algorithm to compute the discrete cosine transform, IEEE TASSP 1984. Sums and products are separate float32
operations in a fixed order, so every machine gets the same bits; a BLAS would not guarantee that. A chunk of n rows is
transformed along its columns, 16 columns at once.
"""

import numpy as np

from ._columns import forward2, forward4, forward8, forward64, inverse2, inverse4, inverse8, inverse64
from ._intrinsics import LANES, add16, butterfly16, helper, transpose8, transpose16, unbutterfly16

_SQRT2 = np.float32(1.4142135)


@helper
def _base(n):
    """Return how many rows are transformed in registers: 64, 8, or all if they are fewer. Steps over more go through memory."""
    return 64 if n >= 64 else min(n, 8)


@helper
def _scale(rows, first, others, out):
    for u in range(rows.shape[0]):
        factor = first if u == 0 else others
        for c in range(rows.shape[1]):
            out[u, c] = np.float32(rows[u, c] * factor)


@helper
def _forward(x, y, factors, out):
    """Write the DCT-II of the columns of x to out, which may be y, but not x. All: float32[n, w]; x and y are overwritten.

    factors: see `transform`.
    """
    n, w = x.shape
    base, first, others = _base(n), factors[0], np.float32(factors[0] * _SQRT2)
    m = n
    while m > base:
        half = m >> 1
        for block in range(0, n, m):
            for i in range(half):
                a, b, t = (block + i) * w, (block + m - 1 - i) * w, (block + i) * w
                for c in range(0, w, LANES):
                    butterfly16(x, a + c, b + c, factors[half + i], y, t + c, t + half * w + c)
        x, y = y, x
        m = half
    whole = n == base
    target, s, t = (out, first, others) if whole else (y, np.float32(1), np.float32(1))
    for at in range(0, n * w, base * w):
        for c in range(0, w, LANES):
            if base == 64:
                forward64(x, at + c, w, s, t, factors, target, at + c, w)
            elif base == 8:
                forward8(x, at + c, w, s, t, factors, target, at + c, w)
            elif base == 4:
                forward4(x, at + c, w, s, t, factors, target, at + c, w)
            else:
                forward2(x, at + c, w, s, t, factors, target, at + c, w)
    if whole:
        return
    x, y = y, x
    m = 2 * base
    while m <= n:
        half = m >> 1
        for block in range(0, n, m):
            for i in range(half):
                a, b, t = (block + i) * w, (block + half + i) * w, (block + 2 * i) * w
                following = w if i + 1 < half else -n * w * 2
                for c in range(0, w, LANES):
                    add16(x, a + c, x, -1, y, t + c)
                    add16(x, b + c, x, b + following + c, y, t + w + c)
        x, y = y, x
        m *= 2
    _scale(x, first, others, out)


@helper
def _inverse(x, y, factors, out):
    """The inverse of _forward: the same steps in reverse order, transposed. Its out may be y, too, and not x."""
    n, w = x.shape
    base, s, t = _base(n), factors[0], np.float32(factors[0] * _SQRT2)
    if n > base:
        _scale(x, s, t, x)
        s, t = np.float32(1), np.float32(1)
    m = n
    while m > base:
        half = m >> 1
        for block in range(0, n, m):
            for i in range(half):
                a, b, to = (block + 2 * i) * w, (block + 2 * i + 1) * w, (block + i) * w
                before = -2 * w if i > 0 else -n * w * 2
                for c in range(0, w, LANES):
                    add16(x, a + c, x, -1, y, to + c)
                    add16(x, b + c, x, b + before + c, y, to + half * w + c)
        x, y = y, x
        m = half
    target = out if n == base else y
    for at in range(0, n * w, base * w):
        for c in range(0, w, LANES):
            if base == 64:
                inverse64(x, at + c, w, s, t, factors, target, at + c, w)
            elif base == 8:
                inverse8(x, at + c, w, s, t, factors, target, at + c, w)
            elif base == 4:
                inverse4(x, at + c, w, s, t, factors, target, at + c, w)
            else:
                inverse2(x, at + c, w, s, t, factors, target, at + c, w)
    x, y = y, x
    m = 2 * base
    while m <= n:
        half = m >> 1
        target = out if m == n else y
        for block in range(0, n, m):
            for i in range(half):
                a, b, d = (block + i) * w, (block + half + i) * w, (block + m - 1 - i) * w
                for c in range(0, w, LANES):
                    unbutterfly16(x, a + c, b + c, factors[half + i], target, a + c, d + c)
        x, y = y, x
        m *= 2


@helper
def transpose(x, y, rows, columns):
    """y[c, r] = x[r, c] for r < rows and c < columns."""
    if rows & 7 or columns & 7:
        for r in range(rows):
            for c in range(columns):
                y[c, r] = x[r, c]
    elif rows & 15 or columns & 15:
        for r in range(0, rows, 8):
            for c in range(0, columns, 8):
                transpose8(x, r * x.shape[1] + c, x.shape[1], y, c * y.shape[1] + r, y.shape[1])
    else:
        for r in range(0, rows, 16):
            for c in range(0, columns, 16):
                transpose16(x, r * x.shape[1] + c, x.shape[1], y, c * y.shape[1] + r, y.shape[1])


@helper
def room(n):
    """Return float32[n, max(n, LANES)], zeros, aligned to 64 bytes; with too few columns, further ones hold nothing."""
    w = max(n, LANES)
    flat = np.zeros(n * w + LANES, np.float32)
    first = (-(flat.ctypes.data >> 2)) & (LANES - 1)
    return flat[first : first + n * w].reshape(n, w)


@helper
def square_in(room):
    """Return a part of a room whose content is not used any more, as float32[n, n]."""
    n = room.shape[0]
    return room.reshape(-1)[: n * n].reshape(n, n)


@helper
def transform_columns(x, y, inverse, factors, out):
    if inverse:
        _inverse(x, y, factors, out)
    else:
        _forward(x, y, factors, out)


@helper
def finish_square(z, y, inverse, factors, part):
    """Transform the columns of z, float32[n, max(n, LANES)], which is overwritten as y is, and write them to part, float32[n, n]."""
    n = z.shape[0]
    if n >= LANES:
        transform_columns(z, y, inverse, factors, part)
    else:
        transform_columns(z, y, inverse, factors, y)
        part[:] = y[:, :n]


@helper
def transform_square(x, y, z, dims, inverse, factors, part):
    """Transform the chunk whose transpose is in x. Its rows are written to part, float32[r, n]; r = n if dims=2.

    x, y, z: float32[n, max(n, LANES)], overwritten.
    """
    n = x.shape[0]
    transform_columns(x, y, inverse, factors, y)
    if dims == 1:
        transpose(y, part, n, part.shape[0])
        return
    transpose(y, z, n, n)
    finish_square(z, y, inverse, factors, part)
