"""Adding decoded containers to a dense gradient, and writing what they did not carry to the residual."""

import numpy as np

from ._compile import kernel
from ._intrinsics import helper, stream16

TILE = 32768  # floats that stay in the L2 cache while every rank's share is added
STREAMED = 4 * 1024 * 1024  # number of floats from which on the sum bypasses the caches, in which it would not stay anyway


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


@kernel("void(float32[::1], uint32[::1], float32[::1], int64[::1], int64[::1], float32)")
def sum_sparse(out, positions, values, cursor, ends, weight):
    """out = weight * (sum of all ranks' sparse vectors), added rank after rank at every position.

    Rank r's part is positions[cursor[r]:ends[r]], ascending and below out.size. cursor is overwritten.
    """
    streamed = out.size >= STREAMED
    tile = np.empty(TILE if streamed else 0, np.float32)
    start = 0
    if streamed:  # up to the first multiple of 64 bytes
        start = (-(out.ctypes.data >> 2)) & 15
        if start > 0:
            _add_tile(out[:start], 0, start, positions, values, cursor, ends, weight)
    while start < out.size:
        stop = min(out.size, start + TILE)
        if streamed and stop - start == TILE:
            _add_tile(tile, start, stop, positions, values, cursor, ends, weight)
            for i in range(0, TILE, 16):
                stream16(tile, i, out, start + i)
        else:
            _add_tile(out[start:stop], start, stop, positions, values, cursor, ends, weight)
        start = stop


@kernel(
    "void(float32[::1], Array(uint32, 1, 'C', readonly=True), Array(float32, 1, 'C', readonly=True),"
    " Array(float32, 1, 'C', readonly=True))"
)
def write_error(residual, positions, values, decoded):
    """residual[positions] = values - decoded: what the container did not carry."""
    for i in range(positions.size):
        residual[positions[i]] = values[i] - decoded[i]
