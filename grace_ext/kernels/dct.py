"""Fast cosine transforms of chunks, forward and inverse, in O(log n) operations for each element.

Lee, A new algorithm to compute the discrete cosine transform, IEEE TASSP 1984. Sums and products are separate float32
operations in a fixed order, so every machine gets the same bits; a BLAS would not guarantee that. A chunk of n rows is
transformed along its columns, all columns of a row at once.
"""

import numpy as np

from ._compile import kernel
from ._intrinsics import add16, butterfly16, helper, transpose8, unbutterfly16

LANES = 16


@helper
def _scale(rows, first, others):
    for u in range(rows.shape[0]):
        factor = first if u == 0 else others
        for c in range(rows.shape[1]):
            rows[u, c] = np.float32(rows[u, c] * factor)


@helper
def _forward(x, y, factors):
    """DCT-II of the columns of x: float32[n, w], in place. y: room of that shape; factors: see `transform`."""
    n, w = x.shape
    m = n
    while m > 1:
        half = m >> 1
        for block in range(0, n, m):
            for i in range(half):
                a, b, t = (block + i) * w, (block + m - 1 - i) * w, (block + i) * w
                for c in range(0, w, LANES):
                    butterfly16(x, a + c, b + c, factors[half + i], y, t + c, t + half * w + c)
        x, y = y, x
        m = half
    m = 2
    while m <= n:
        half = m >> 1
        for block in range(0, n, m):
            for i in range(half):
                a, b, t = (block + i) * w, (block + half + i) * w, (block + 2 * i) * w
                following = w if i + 1 < half else -n * w * 2
                for c in range(0, w, LANES):
                    add16(x, a + c, -1, y, t + c)
                    add16(x, b + c, b + following + c, y, t + w + c)
        x, y = y, x
        m *= 2
    _scale(x, factors[0], np.float32(factors[0] * np.float32(1.4142135)))


@helper
def _inverse(x, y, factors):
    """The inverse of _forward: the same steps in reverse order, transposed."""
    n, w = x.shape
    _scale(x, factors[0], np.float32(factors[0] * np.float32(1.4142135)))
    m = n
    while m > 1:
        half = m >> 1
        for block in range(0, n, m):
            for i in range(half):
                a, b, t = (block + 2 * i) * w, (block + 2 * i + 1) * w, (block + i) * w
                before = -2 * w if i > 0 else -n * w * 2
                for c in range(0, w, LANES):
                    add16(x, a + c, -1, y, t + c)
                    add16(x, b + c, b + before + c, y, t + half * w + c)
        x, y = y, x
        m = half
    m = 2
    while m <= n:
        half = m >> 1
        for block in range(0, n, m):
            for i in range(half):
                a, b, d = (block + i) * w, (block + half + i) * w, (block + m - 1 - i) * w
                for c in range(0, w, LANES):
                    unbutterfly16(x, a + c, b + c, factors[half + i], y, a + c, d + c)
        x, y = y, x
        m *= 2


@helper
def _transpose(x, y, rows, columns):
    """y[c, r] = x[r, c] for r < rows and c < columns."""
    if rows & 7 or columns & 7:
        for r in range(rows):
            for c in range(columns):
                y[c, r] = x[r, c]
    else:
        for r in range(0, rows, 8):
            for c in range(0, columns, 8):
                transpose8(x, r * x.shape[1] + c, x.shape[1], y, c * y.shape[1] + r, y.shape[1])


@kernel("void(float32[:, ::1], int64, boolean, Array(float32, 1, 'C', readonly=True))")
def transform(rows, dims, inverse, factors):
    """Transform chunks in place: with dims=1 every row, with dims=2 every n rows along both axes.

    rows: float32[m, n], n a power of two, m a multiple of n if dims=2. factors: float32[n]: factors[0] = 1 / sqrt(n), and
    for every power of two h < n and i < h: factors[h + i] = 1 / (2 cos(pi (2i + 1) / 4h)).
    """
    n = rows.shape[1]
    w = max(n, LANES)  # with too few columns, further ones hold nothing
    x, y = np.zeros((n, w), np.float32), np.zeros((n, w), np.float32)
    for start in range(0, rows.shape[0], n):
        part = rows[start : start + n]
        _transpose(part, x, part.shape[0], n)
        if inverse:
            _inverse(x, y, factors)
        else:
            _forward(x, y, factors)
        if dims == 2:
            _transpose(x, y, n, n)
            if inverse:
                _inverse(y, x, factors)
            else:
                _forward(y, x, factors)
            part[:] = y[:, :n]
        else:
            _transpose(x, part, n, part.shape[0])
