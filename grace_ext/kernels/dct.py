"""Fast cosine transforms of chunks, forward and inverse, in O(log n) operations for each element; see _cosine.py."""

import numpy as np

from ._chunk_topk import GROUPS, select_of_chunk
from ._compile import kernel
from ._cosine import finish_square, room, square_in, transform_columns, transform_square, transpose
from ._helpers import NON_FINITE, largest_magnitude
from ._intrinsics import LANES, add16, bit_length, bits_of, helper


@kernel("void(float32[:, ::1], int64, boolean, Array(float32, 1, 'C', readonly=True))")
def transform(rows, dims, inverse, factors):
    """Transform chunks in place: with dims=1 every row, with dims=2 every n rows along both axes.

    rows: float32[m, n], n a power of two, m a multiple of n if dims=2. factors: float32[n]: factors[0] = 1 / sqrt(n), and
    for every power of two h < n and i < h: factors[h + i] = 1 / (2 cos(pi (2i + 1) / 4h)).
    """
    n = rows.shape[1]
    x, y, z = room(n), room(n), room(n)
    for start in range(0, rows.shape[0], n):
        part = rows[start : start + n]
        transpose(part, x, part.shape[0], n)
        transform_square(x, y, z, dims, inverse, factors, part)


@helper
def _add(a, b, out):
    for i in range(out.size):
        out[i] = np.float32(a[i] + b[i])


@helper
def _cut(values, limit, largest):
    """Cut the magnitudes of float32[n], whose largest has these bits, to `limit`."""
    if largest > bits_of(limit):
        for i in range(values.size):
            values[i] = min(max(values[i], -limit), limit)


@helper
def _is_blank(values):
    """Tell whether no bit of float32[n] is set."""
    bits = np.uint32(0)
    for i in range(values.size):
        bits |= bits_of(values[i])
    return bits == 0


@helper
def _load(dense, first, x, last):
    """Write the transpose of the rows from dense[first] on, filled up with zeros, to x. last: float32[n, n], zeros at first."""
    n = last.shape[0]
    if first + last.size <= dense.size:
        transpose(dense[first : first + last.size].reshape(last.shape), x, n, n)
        return
    flat = last.reshape(-1)
    for i in range(dense.size - first):
        flat[i] = dense[first + i]
    transpose(last, x, n, n)


@kernel(
    "void(Array(float32, 1, 'C', readonly=True), int64, float32, Array(float32, 1, 'C', readonly=True), float32[:, ::1])"
)
def forward(dense, dims, limit, factors, out):
    """Write the transform of float32[d], cut to magnitudes up to `limit` and filled up with zeros, to `out`; see transform."""
    n = out.shape[1]
    x, y, z, last = room(n), room(n), room(n), np.zeros((n, n), np.float32)
    for start in range(0, out.shape[0], n):
        _load(dense, start * n, x, last)
        flat = x.reshape(-1)
        _cut(flat, limit, largest_magnitude(flat))
        transform_square(x, y, z, dims, False, factors, out[start : start + n])


@kernel(
    "int64(Array(float32, 1, 'C', readonly=True), Array(float32, 1, 'C', readonly=True), float32[::1], boolean, int64, int64,"
    " float32, Array(float32, 1, 'C', readonly=True), int64, uint32[::1], float32[::1])"
)
def forward_largest(gradient, residual, out, fused, n, dims, limit, factors, k, positions, found):
    """Select the k largest coefficients of each chunk of `gradient + residual` (written to `out`) or, if not fused, of `gradient`.

    What `forward` and then chunks.select_chunks do, square by square, so that the coefficients stay in the caches. gradient,
    residual, out: float32[d]; if not fused, the latter two are ignored. Returns how many coefficients are selected; -1 if an
    element is not finite, and out is not complete then. positions: uint32[m] and found: float32[m], m = k for every chunk.
    """
    x, y, z, last = room(n), room(n), room(n), np.zeros((n, n), np.float32)
    part = square_in(x if dims == 2 else z)
    chunk, square, count, d = n**dims, n * n, 0, gradient.size
    groups, work, flat = np.empty(GROUPS, np.uint32), np.empty((3, chunk + LANES), np.uint32), x.reshape(-1)
    dense = out if fused else gradient
    for first in range(0, d, square):
        stop = min(d, first + square)
        if fused:
            _add(gradient[first:stop], residual[first:stop], out[first:stop])
        largest = largest_magnitude(dense[first:stop])
        if largest >= NON_FINITE:
            return -1
        if largest == 0 and _is_blank(dense[first:stop]):
            part[:] = np.float32(0)
        else:
            _load(dense, first, x, last)
            _cut(flat, limit, largest)
            transform_square(x, y, z, dims, False, factors, part)
        for at in range(0, -(-(stop - first) // chunk) * chunk, chunk):
            coefficients = part.reshape(-1)[at : at + chunk]
            count = select_of_chunk(coefficients, first + at, k, groups, work, positions, found, count)
    return count


@helper
def _spread(packed, rows, count, nothing, out):
    """Write row c of packed to row rows[c] of out, for c < count, and zeros to all others. nothing: float32[LANES], zeros."""
    n, w, c = out.shape[0], out.shape[1], 0
    for r in range(n):
        there = c < count and rows[c] == r
        if w % LANES != 0:
            for k in range(w):
                out[r, k] = packed[c, k] if there else np.float32(0)
        elif there:
            for k in range(0, w, LANES):
                add16(packed, c * packed.shape[1] + k, packed, -1, out, r * w + k)
        else:
            for k in range(0, w, LANES):
                add16(nothing, 0, nothing, -1, out, r * w + k)
        c += np.int64(there)


@helper
def _scatter(positions, values, p, start, n, x, rows):
    """Write the coefficients from positions[p] on that lie in the square at `start` to x, one column for each row with such that are not 0.

    x: float32[n, max(n, LANES)], written as a matrix with a multiple of LANES columns. rows: int64[n], written: the rows.
    Returns the end of the positions, the number of rows and the number of columns.
    """
    first, count, shift = p, 0, bit_length(np.uint64(n - 1))
    while p < positions.size and np.int64(positions[p]) < start + n * n:
        row = (np.int64(positions[p]) - start) >> shift
        if bits_of(values[p]) != 0 and (count == 0 or rows[count - 1] != row):
            rows[count] = row
            count += 1
        p += 1
    width, flat, column = -(-count // LANES) * LANES, x.reshape(-1), 0
    flat[: n * width] = np.float32(0)
    for q in range(first, p):
        if bits_of(values[q]) != 0:
            at = np.int64(positions[q]) - start
            column += np.int64(at >> shift != rows[column])
            flat[(at & (n - 1)) * width + column] = values[q]
    return p, count, width


@kernel(
    "void(Array(float32, 1, 'C', readonly=True), int64, int64, Array(float32, 1, 'C', readonly=True),"
    " Array(uint32, 1, 'C', readonly=True), Array(float32, 1, 'C', readonly=True), float32[::1])"
)
def subtract_inverse(dense, n, dims, factors, positions, values, out):
    """out = dense - the inverse transform of coefficients that are 0 except for `values` at `positions`, without its padding.

    Rows of a square without coefficients are not transformed. dense, out: float32[d], may be the same array; positions:
    uint32[k], ascending, below d filled up to whole chunks; values: float32[k].
    """
    x, y, z = room(n), room(n), room(n)
    part = square_in(x if dims == 2 else y)
    rows, nothing, flat, square, p = np.empty(n, np.int64), np.zeros(LANES, np.float32), part.reshape(-1), n * n, 0
    for start in range(0, dense.size, square):
        p, count, width = _scatter(positions, values, p, start, n, x, rows)
        given, left = dense[start : start + square], out[start : start + square]
        if count == 0:
            left[:] = given
            continue
        packed, lines = x.reshape(-1)[: n * width].reshape(n, width), y.reshape(-1)[: n * width].reshape(n, width)
        transform_columns(packed, lines, True, factors, lines)
        transpose(lines, x, n, min(n, width))
        spread = z if dims == 2 else part
        _spread(x, rows, count, nothing, spread)
        if dims == 2:
            finish_square(z, y, True, factors, part)
        for i in range(given.size):  # in two loops, which vectorise where dense is out as well
            flat[i] = given[i] - flat[i]
        for i in range(given.size):
            left[i] = flat[i]
