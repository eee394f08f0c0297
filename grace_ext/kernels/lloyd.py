"""The quantizer with uniform thresholds and centroids: see _lloyd_levels.py for the levels and how they are found."""

import numpy as np

from ._compile import kernel
from ._helpers import MAGNITUDE
from ._intrinsics import bits_of, float_of, helper
from ._lloyd_levels import (
    BINS,
    FRACTIONS,
    LARGEST,
    MOST,
    SAMPLE,
    SMALLEST,
    bin_width,
    choose_by_counts,
    choose_levels,
    moments,
    used_bins,
)

__all__ = [
    "BINS",
    "FRACTIONS",
    "HEAD",
    "LARGEST",
    "MOST",
    "SAMPLE",
    "SMALLEST",
    "choose_from_counts",
    "choose_levels",
    "dequantize",
    "gather_escapes",
    "level_values",
    "lloyd_decode",
    "lloyd_encode",
    "moments",
    "put_head",
    "quantize",
]

HEAD = 13  # bytes of a section ahead of the fractions
_LARGEST = 3.4028234663852886e38


@helper
def lloyd_encode(values, grid, most, codes):
    """codes (uint8[k]) = most + signed level, or 255 where the level is above MOST (then most is MOST)."""
    inverse = np.float32(np.float32(1) / grid[1])
    shift = np.float32(np.float32(1) - grid[0] / grid[1])
    top, middle = np.float32(most + 1), np.int32(most)
    for i in range(values.size):
        u = bits_of(values[i])
        y = float_of(np.uint32(u & MAGNITUDE)) * inverse + shift
        m = np.int32(min(max(y, np.float32(0)), top))
        sign = np.int32(np.int32(u) >> np.int32(31))
        codes[i] = np.uint8(middle + np.int32(np.int32(m ^ sign) - sign))


@helper
def _put_float(x, out, at):
    """Write a float32 to 4 bytes of out, little-endian."""
    u = bits_of(x)
    for byte in range(4):
        out[at + byte] = np.uint8(np.uint32(u >> np.uint32(8 * byte)) & np.uint32(255))


@kernel("UniTuple(int64, 2)(Array(float32, 1, 'C', readonly=True), float64, uint8[::1], uint8[::1])")
def quantize(values, error, head, codes):
    """Choose the levels and write the code of each value; returns the levels on each side, and how many values are beyond.

    values: float32[k], k >= 1, finite. head: uint8[HEAD + FRACTIONS], written as the section begins: these two numbers, the
    grid and the fractions. codes: uint8[k], as lloyd_encode writes them. Where all values are 0, all of this is.
    """
    found, grid, fractions = np.empty(3), np.zeros(2, np.float32), head[HEAD:]
    moments(values, found)
    most = beyond = 0
    if found[0] == 0:
        codes[:] = np.uint8(0)
    else:
        most = choose_levels(values, found, error, grid, fractions)
        lloyd_encode(values, grid, most, codes)
    if most == MOST:
        for code in codes:
            beyond += np.int64(code == 255)
    put_head(most, grid, beyond, head)
    return most, beyond


@helper
def put_head(most, grid, beyond, head):
    head[0] = np.uint8(most)
    _put_float(grid[0], head, 1)
    _put_float(grid[1], head, 5)
    for byte in range(4):
        head[9 + byte] = np.uint8((beyond >> (8 * byte)) & 255)


@kernel(
    "int64(Array(int32, 1, 'C', readonly=True), int64, int64, Array(float64, 1, 'C', readonly=True), float64, uint8[::1],"
    " float32[::1])"
)
def choose_from_counts(counts, total, k, moments, error, head, places):
    """Choose the levels of `quantize` from counts that something else has made, as an accelerator does.

    Returns how many levels there are on each side.

    counts: int32[BINS], the magnitudes in each bin, whose width is `bin_width`; total: how many of the k values were counted.
    moments: float64[3], the sum of squares, the smallest and the largest magnitude. head: uint8[HEAD + FRACTIONS], written as
    if no value were beyond the levels. places: float32[2], written: the inverse of the step, and what is to be added to a
    magnitude in steps for its level.
    """
    grid, fractions, most = np.zeros(2, np.float32), head[HEAD:], 0
    places[:] = np.float32(0)
    head[:] = np.uint8(0)
    if moments[0] != 0:
        width = bin_width(moments, k, error)
        bins = used_bins(moments, width)
        sums = np.zeros((bins + 1, 3))
        for j in range(bins):
            sums[j + 1, 0] = np.float64(counts[j])
        most = choose_by_counts(sums, bins, np.float64(total), moments, width, grid, fractions)
        places[0] = np.float32(np.float32(1) / grid[1])
        places[1] = np.float32(np.float32(1) - grid[0] / grid[1])
    put_head(most, grid, 0, head)
    return most


@kernel("int64(Array(float32, 1, 'C', readonly=True), Array(uint8, 1, 'C', readonly=True), int64, float32[::1])")
def gather_escapes(values, codes, escape, out):
    """Write the values whose code is `escape` to out, which has room for them; returns how many."""
    j = 0
    for i in range(codes.size):
        if codes[i] == escape:
            out[j] = values[i]
            j += 1
    return j


@helper
def level_values(start, step, fractions, most, table):
    """Fill table, float32[256], with the value of each code: fractions, uint8[min(most, FRACTIONS)], for the first levels.

    In float64; at the very top a level could round to Inf, so it is cut to the largest float32.
    """
    table[:] = np.float32(0)
    for m in range(most):
        place = np.float64(start) + (m + (np.float64(fractions[min(m, FRACTIONS - 1)]) + 0.5) / 256.0) * np.float64(step)
        value = np.float32(min(place, _LARGEST))
        table[most + 1 + m], table[most - 1 - m] = value, -value


@kernel(
    "boolean(Array(uint8, 1, 'C', readonly=True), float32, float32, Array(uint8, 1, 'C', readonly=True), int64,"
    " Array(float32, 1, 'C', readonly=True), float32[::1])"
)
def dequantize(codes, start, step, fractions, most, escapes, out):
    """The inverse of quantize: see level_values and lloyd_decode. Returns False unless all of `escapes` are used."""
    table = np.empty(256, np.float32)
    level_values(start, step, fractions, most, table)
    return lloyd_decode(codes, table, escapes, out)


@helper
def lloyd_decode(codes, table, escapes, out):
    """out[i] = table[codes[i]], or the next of `escapes` where the code is 255. Returns False unless all of those are used.

    codes: uint8[k]; table: float32[256]; out: float32[k].
    """
    for i in range(out.size):
        out[i] = table[codes[i]]
    if escapes.size == 0:
        return True
    j = 0
    for i in range(out.size):
        if codes[i] == 255:
            if j == escapes.size:
                return False
            out[i] = escapes[j]
            j += 1
    return j == escapes.size
