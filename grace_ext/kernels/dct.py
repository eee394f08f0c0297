"""Fast cosine transforms of chunks, forward and inverse, in O(log n) operations for each element.

Lee, A new algorithm to compute the discrete cosine transform, IEEE TASSP 1984. Sums and products are separate float32
operations in a fixed order, so every machine gets the same bits; a BLAS would not guarantee that. A chunk of n rows is
transformed along its columns, 16 columns at once.
"""

import numpy as np

from ._columns import forward8, forward64, inverse8, inverse64
from ._compile import kernel
from ._helpers import largest_magnitude
from ._intrinsics import LANES, add16, bits_of, butterfly16, helper, transpose8, transpose16, unbutterfly16

_SQRT2 = np.float32(1.4142135)


@helper
def _base(n):
    """Return how many rows are transformed in registers: 64, 8 or 1. Steps over more rows go through memory."""
    return 64 if n >= 64 else 8 if n >= 8 else 1


@helper
def _scale(rows, first, others, out):
    for u in range(rows.shape[0]):
        factor = first if u == 0 else others
        for c in range(rows.shape[1]):
            out[u, c] = np.float32(rows[u, c] * factor)


@helper
def _forward(x, y, factors, out):
    """Write the DCT-II of the columns of x to out, which may be x. All three: float32[n, w]; x and y are overwritten.

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
    target, s, t = (out, first, others) if whole else (x, np.float32(1), np.float32(1))
    for at in range(0, n * w, base * w):
        for c in range(0, w, LANES):
            if base == 64:
                forward64(x, at + c, w, s, t, factors, target, at + c, w)
            elif base == 8:
                forward8(x, at + c, w, s, t, factors, target, at + c, w)
    if whole:
        return
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
    """The inverse of _forward: the same steps in reverse order, transposed."""
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
    target = out if n == base else x
    for at in range(0, n * w, base * w):
        for c in range(0, w, LANES):
            if base == 64:
                inverse64(x, at + c, w, s, t, factors, target, at + c, w)
            elif base == 8:
                inverse8(x, at + c, w, s, t, factors, target, at + c, w)
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
def _transpose(x, y, rows, columns):
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
def _room(n):
    return np.zeros((n, max(n, LANES)), np.float32)  # with too few columns, further ones hold nothing


@helper
def _columns(x, y, inverse, factors, out):
    if inverse:
        _inverse(x, y, factors, out)
    else:
        _forward(x, y, factors, out)


@helper
def _transform(x, y, z, dims, inverse, factors, part):
    """Transform the chunk whose transpose is in x. Its rows are written to part, float32[r, n]; r = n if dims=2.

    x, y, z: float32[n, max(n, LANES)], overwritten.
    """
    n = x.shape[0]
    _columns(x, y, inverse, factors, x)
    if dims == 1:
        _transpose(x, part, n, part.shape[0])
        return
    _transpose(x, z, n, n)
    if n >= LANES:
        _columns(z, y, inverse, factors, part)
    else:
        _columns(z, y, inverse, factors, z)
        part[:] = z[:, :n]


@kernel("void(float32[:, ::1], int64, boolean, Array(float32, 1, 'C', readonly=True))")
def transform(rows, dims, inverse, factors):
    """Transform chunks in place: with dims=1 every row, with dims=2 every n rows along both axes.

    rows: float32[m, n], n a power of two, m a multiple of n if dims=2. factors: float32[n]: factors[0] = 1 / sqrt(n), and
    for every power of two h < n and i < h: factors[h + i] = 1 / (2 cos(pi (2i + 1) / 4h)).
    """
    n = rows.shape[1]
    x, y, z = _room(n), _room(n), _room(n)
    for start in range(0, rows.shape[0], n):
        part = rows[start : start + n]
        _transpose(part, x, part.shape[0], n)
        _transform(x, y, z, dims, inverse, factors, part)


@kernel(
    "void(Array(float32, 1, 'C', readonly=True), int64, float32, Array(float32, 1, 'C', readonly=True), float32[:, ::1])"
)
def forward(dense, dims, limit, factors, out):
    """Write the transform of float32[d], cut to magnitudes up to `limit` and filled up with zeros, to `out`; see transform."""
    n = out.shape[1]
    x, y, z, last = _room(n), _room(n), _room(n), np.zeros((n, n), np.float32)
    for start in range(0, out.shape[0], n):
        part, first = out[start : start + n], start * n
        if first + part.size <= dense.size:
            _transpose(dense[first : first + part.size].reshape(part.shape), x, part.shape[0], n)
        else:
            flat = last.reshape(-1)
            for i in range(dense.size - first):
                flat[i] = dense[first + i]
            _transpose(last, x, part.shape[0], n)
        flat = x.reshape(-1)
        if largest_magnitude(flat) > bits_of(limit):
            for i in range(flat.size):
                flat[i] = min(max(flat[i], -limit), limit)
        _transform(x, y, z, dims, False, factors, part)


@kernel(
    "void(Array(float32, 1, 'C', readonly=True), int64, int64, Array(float32, 1, 'C', readonly=True),"
    " Array(uint32, 1, 'C', readonly=True), Array(float32, 1, 'C', readonly=True), float32[::1])"
)
def subtract_inverse(dense, n, dims, factors, positions, values, out):
    """out = dense - the inverse transform of coefficients that are 0 except for `values` at `positions`, without its padding.

    dense, out: float32[d], may be the same array; positions: uint32[k], ascending, below d filled up to whole chunks; values:
    float32[k].
    """
    x, y, z, part = _room(n), _room(n), _room(n), np.empty((n, n), np.float32)
    flat, square, p = part.reshape(-1), n * n, 0
    for start in range(0, dense.size, square):
        x[:] = np.float32(0)
        while p < positions.size and np.int64(positions[p]) < start + square:
            at = np.int64(positions[p]) - start
            x[at % n, at // n] = values[p]
            p += 1
        _transform(x, y, z, dims, True, factors, part)
        given, left = dense[start : start + square], out[start : start + square]
        for i in range(given.size):
            left[i] = given[i] - flat[i]
