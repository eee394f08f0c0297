"""Adding decoded containers to a dense gradient, and writing what they did not carry to the residual."""

import numpy as np

from ._compile import kernel
from ._helpers import STREAMED
from ._intrinsics import helper, stream16, trailing_zeros
from ._sums import LANES, add_square_rows

TILE = 32768  # floats that stay in the L2 cache while every rank's share is added


@kernel("void(float32[::1], Array(uint32, 1, 'C', readonly=True), Array(float32, 1, 'C', readonly=True), float32)")
def add_at(out, positions, values, weight):
    """out[positions] += weight * values. Positions are below out.size and unique."""
    for i in range(np.uint64(positions.size)):
        out[positions[i]] += weight * values[i]


@kernel("void(float32[::1], Array(float32, 1, 'C', readonly=True), float32)")
def add_dense(out, values, weight):
    """out += weight * values, both float32[d]."""
    for i in range(out.size):
        out[i] += weight * values[i]


@helper
def _add_tile(tile, start, stop, positions, values, cursor, ends, weight):
    tile[: stop - start] = np.float32(0)
    first, last = np.uint32(start), np.uint32(stop)
    for r in range(ends.size):
        i, end = np.uint64(cursor[r]), np.uint64(ends[r])
        while i < end and positions[i] < last:
            tile[np.uint32(positions[i] - first)] += weight * values[i]
            i += np.uint64(1)
        cursor[r] = np.int64(i)


@helper
def _stream(tile, out):
    """out = tile, past the caches where that can be: whole lines of 64 bytes."""
    at = min(out.size, (-(out.ctypes.data >> 2)) & 15)
    out[:at] = tile[:at]
    while at + 16 <= out.size:
        stream16(tile, at, out, at)
        at += 16
    out[at:] = tile[at:]


@kernel("void(float32[::1], uint32[::1], float32[::1], int64[::1], int64[::1], float32)")
def sum_sparse(out, positions, values, cursor, ends, weight):
    """out = weight * (sum of all ranks' sparse vectors), added rank after rank at every position.

    Rank r's part is positions[cursor[r]:ends[r]], ascending and below out.size. cursor is overwritten.
    """
    streamed = out.size >= STREAMED
    tile = np.empty(TILE if streamed else 0, np.float32)
    start = 0
    while start < out.size:
        stop = min(out.size, start + TILE)
        if streamed:
            if start == 0:  # later tiles begin at a multiple of 64 bytes
                stop -= (out.ctypes.data >> 2) & 15
            _add_tile(tile, start, stop, positions, values, cursor, ends, weight)
            _stream(tile[: stop - start], out[start:stop])
        else:
            _add_tile(out[start:stop], start, stop, positions, values, cursor, ends, weight)
        start = stop


@kernel(
    "void(float32[::1], uint32[::1], float32[::1], int64[::1], int64[::1], float32, Array(int64, 2, 'C', readonly=True),"
    " float32[::1])"
)
def sum_sparse_squares(out, positions, values, cursor, ends, weight, shapes, sums):
    """Like `sum_sparse`, and sums = the sums of squares of each row and column of the matrices that out consists of.

    shapes: int64[m, 2], rows and columns of each matrix, which together have out.size elements; sums: float32[n], overwritten:
    those of the first matrix's rows, then of its columns, and so on, as from second_moment.square_sums.
    """
    streamed = out.size >= STREAMED
    tile, lanes = np.empty(TILE if streamed else 0, np.float32), np.empty(2 * LANES, np.float32)
    start = at = 0
    for m in range(shapes.shape[0]):
        rows, width = shapes[m, 0], shapes[m, 1]
        by_row, by_column = sums[at : at + rows], sums[at + rows : at + rows + width]
        at += rows + width
        by_column[:] = 0
        at_once = max(2, TILE // max(width, 1) & ~1)  # rows; an even number of them is faster
        for first in range(0, rows, at_once):
            last = min(rows, first + at_once)
            stop = start + (last - first) * width
            in_tile = streamed and stop - start <= TILE
            part = tile[: stop - start] if in_tile else out[start:stop]
            _add_tile(part, start, stop, positions, values, cursor, ends, weight)
            add_square_rows(part, by_row[first:last], by_column, lanes)
            if in_tile:
                _stream(part, out[start:stop])
            start = stop


@kernel("void(float32[::1], uint32[::1], float32[::1], int64[::1], int64[::1], Array(float32, 1, 'C', readonly=True))")
def mean_sparse(out, positions, values, cursor, ends, shares):
    """out = the mean of the ranks' sparse vectors, of each element over the ranks that have it; 0 where none has.

    Arguments as of `sum_sparse`; shares: how much each rank counts, above 0.
    """
    total = np.empty(TILE, np.float32)
    for start in range(0, out.size, TILE):
        tile = out[start : start + TILE]
        first, last = np.uint32(start), np.uint32(start + tile.size)
        tile[:], total[:] = np.float32(0), np.float32(0)
        for r in range(ends.size):
            i, end, share = np.uint64(cursor[r]), np.uint64(ends[r]), shares[r]
            while i < end and positions[i] < last:
                place = np.uint32(positions[i] - first)
                tile[place] += share * values[i]
                total[place] += share
                i += np.uint64(1)
            cursor[r] = np.int64(i)
        for place in range(tile.size):
            tile[place] = tile[place] / total[place] if total[place] > 0 else np.float32(0)


@kernel("int64(int64, uint32[::1], float32[::1], int64[::1], int64[::1], float32, uint32[::1], float32[::1])")
def sum_sparse_at(d, positions, values, cursor, ends, weight, at, sums):
    """Like `sum_sparse`, but where no rank has an element nothing is written: return how many there are, at and sums.

    d: number of elements of the vector; at: uint32[n], ascending, and sums: float32[n], of which as many as there are ranks'
    elements have to fit.
    """
    tile, seen = np.zeros(TILE, np.float32), np.zeros(TILE // 64, np.uint64)
    n = 0
    for start in range(0, d, TILE):
        last = np.uint32(min(d, start + TILE) - 1)
        for r in range(ends.size):
            i = cursor[r]
            while i < ends[r] and positions[i] <= last:
                place = np.int64(positions[i]) - start
                tile[place] += weight * values[i]
                seen[place >> 6] |= np.uint64(1) << np.uint64(place & 63)
                i += 1
            cursor[r] = i
        for word in range(seen.size):
            bits = seen[word]
            while bits:
                place = 64 * word + np.int64(trailing_zeros(bits))
                at[n], sums[n] = np.uint32(start + place), tile[place]
                tile[place] = 0
                n += 1
                bits &= bits - np.uint64(1)
            seen[word] = 0
    return n


@kernel(
    "void(float32[::1], Array(uint32, 1, 'C', readonly=True), Array(float32, 1, 'C', readonly=True),"
    " Array(float32, 1, 'C', readonly=True))"
)
def write_error(residual, positions, values, decoded):
    """residual[positions] = values - decoded: what the container did not carry."""
    for i in range(positions.size):
        residual[positions[i]] = values[i] - decoded[i]
