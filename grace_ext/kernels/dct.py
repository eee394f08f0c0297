"""Fast cosine transforms of chunks, forward and inverse, in O(log n) operations an element.

Lee, A new algorithm to compute the discrete cosine transform, IEEE TASSP 1984. Sums and products are separate float32
operations in one fixed order, so every machine gets the same bits; a BLAS would not promise that. A chunk of n rows is
transformed along its columns, all columns of a row at once.
"""

import numpy as np

from ._compile import kernel
from ._intrinsics import helper


@helper
def _scale(rows, first, others):
    for u in range(rows.shape[0]):
        factor = first if u == 0 else others
        for c in range(rows.shape[1]):
            rows[u, c] = np.float32(rows[u, c] * factor)


@helper
def _butterfly(a, b, factor, total, difference):
    for c in range(a.size):
        x, y = a[c], b[c]
        total[c] = np.float32(x + y)
        difference[c] = np.float32(np.float32(x - y) * factor)


@helper
def _unbutterfly(a, b, factor, front, back):
    for c in range(a.size):
        y = np.float32(b[c] * factor)
        front[c] = np.float32(a[c] + y)
        back[c] = np.float32(a[c] - y)


@helper
def _add_rows(a, b, out):
    for c in range(a.size):
        out[c] = np.float32(a[c] + b[c])


@helper
def _copy_row(a, out):
    for c in range(a.size):
        out[c] = a[c]


@helper
def _forward(x, y, factors):
    """DCT-II of the columns of x: float32[n, w], in place; y: room of that shape. factors: see `transform`."""
    n = x.shape[0]
    m = n
    while m > 1:
        half = m >> 1
        for block in range(0, n, m):
            for i in range(half):
                _butterfly(x[block + i], x[block + m - 1 - i], factors[half + i], y[block + i], y[block + half + i])
        x, y = y, x
        m = half
    m = 2
    while m <= n:
        half = m >> 1
        for block in range(0, n, m):
            for i in range(half):
                _copy_row(x[block + i], y[block + 2 * i])
                if i + 1 < half:
                    _add_rows(x[block + half + i], x[block + half + i + 1], y[block + 2 * i + 1])
                else:
                    _copy_row(x[block + half + i], y[block + 2 * i + 1])
        x, y = y, x
        m *= 2
    _scale(x, factors[0], np.float32(factors[0] * np.float32(1.4142135)))


@helper
def _inverse(x, y, factors):
    """The inverse of _forward: the same steps backwards, transposed."""
    n = x.shape[0]
    _scale(x, factors[0], np.float32(factors[0] * np.float32(1.4142135)))
    m = n
    while m > 1:
        half = m >> 1
        for block in range(0, n, m):
            for i in range(half):
                _copy_row(x[block + 2 * i], y[block + i])
                if i > 0:
                    _add_rows(x[block + 2 * i + 1], x[block + 2 * i - 1], y[block + half + i])
                else:
                    _copy_row(x[block + 1], y[block + half])
        x, y = y, x
        m = half
    m = 2
    while m <= n:
        half = m >> 1
        for block in range(0, n, m):
            for i in range(half):
                _unbutterfly(x[block + i], x[block + half + i], factors[half + i], y[block + i], y[block + m - 1 - i])
        x, y = y, x
        m *= 2


@helper
def _transpose(x, y):
    """y = x.T, in tiles of 8 x 8."""
    n = x.shape[0]
    if n < 8:
        for i in range(n):
            for j in range(n):
                y[j, i] = x[i, j]
        return
    for i in range(0, n, 8):
        for j in range(0, n, 8):
            for k in range(8):
                to = y[j + k, i:i + 8]
                for t in range(8):
                    to[t] = x[i + t, j + k]


@kernel("void(float32[:, ::1], int64, boolean, Array(float32, 1, 'C', readonly=True))")
def transform(rows, dims, inverse, factors):
    """Transform chunks in place: with dims=1 every row, with dims=2 every n rows along both axes.

    rows: float32[m, n], n a power of two, m a multiple of n if dims=2. factors: float32[n]: factors[0] = 1 / sqrt(n), and
    for every power of two h < n and i < h: factors[h + i] = 1 / (2 cos(pi (2i + 1) / 4h)).
    """
    n = rows.shape[1]
    x, y = np.empty((n, n), np.float32), np.empty((n, n), np.float32)
    for start in range(0, rows.shape[0], n):
        part = rows[start:start + n]
        if part.shape[0] == n:
            _transpose(part, x)
        else:
            x[:] = np.float32(0)
            for t in range(part.shape[0]):
                for c in range(n):
                    x[c, t] = part[t, c]
        if inverse:
            _inverse(x, y, factors)
        else:
            _forward(x, y, factors)
        if dims == 2:
            _transpose(x, y)
            if inverse:
                _inverse(y, x, factors)
            else:
                _forward(y, x, factors)
            part[:] = y
        elif part.shape[0] == n:
            _transpose(x, part)
        else:
            for t in range(part.shape[0]):
                for c in range(n):
                    part[t, c] = x[c, t]
