"""Quantile buckets: a fine histogram of the values, cut into parts of equal count, and the mean of each part."""

import numpy as np

from ._compile import kernel
from ._helpers import MAGNITUDE, magnitude_range
from ._intrinsics import bits_of, helper

MOST_BINS = 1 << 14
_OCTAVES = np.uint32(32 << 23)  # magnitudes below 2**-32 of the largest are in the same bin as those just above


@helper
def _bin(value, floor, shift, bins):
    """Return the bin of a value: negative ones are below `bins`, zeros in `bins`, positive ones above, all ascending."""
    x = bits_of(value)
    m = np.int64(x & MAGNITUDE)
    away = (max(m - floor, 0) >> shift) + 1
    away = away if m else 0
    return bins - away if x >> np.uint32(31) else bins + away


@helper
def _cut(counts, first, last, parts, lookup, level):
    """Cut the bins first..last - 1 into at most `parts` levels of equal count, beginning at `level`; returns the next level.

    parts >= 1. A bin with more than its share is a level of its own if levels are left.
    """
    left = np.int64(0)
    for i in range(first, last):
        left += np.int64(counts[i])
    held = np.int64(0)
    for i in range(first, last):
        count = np.int64(counts[i])
        if count:
            share = (left + held + parts - 1) // parts
            if held and parts > 1 and (held >= share or count >= share):
                level += 1
                parts -= 1
                held = np.int64(0)
            held += count
            left -= count
        lookup[i] = np.uint8(level)
    return level + (1 if held else 0)


@kernel("int64(Array(float32, 1, 'C', readonly=True), int64, uint32[::1], uint8[::1], uint8[::1], float32[::1])")
def sketch_encode(values, most, counts, lookup, levels, table):
    """Put values in buckets of about equal count, none with both signs; zeros have a bucket of their own.

    values: float32[k], finite, k >= 1; most: buckets, 4 to 256; counts, lookup: uint32 and uint8[2 * bins + 1], overwritten;
    with more bins (up to 2**14) the counts are more equal. levels: uint8[k] and table: float32[256], written: the buckets
    ascending from 0, and the mean of each. Returns how many buckets there are.
    """
    bins = counts.size >> 1
    smallest, largest = magnitude_range(values)
    floor = np.int64(max(smallest, np.uint32(largest - _OCTAVES)) if largest > _OCTAVES else smallest)
    shift = 0
    while (np.int64(largest) - floor) >> shift >= bins:
        shift += 1
    counts[:] = np.uint32(0)
    for i in range(values.size):
        counts[_bin(values[i], floor, shift, bins)] += np.uint32(1)
    zeros = np.int64(counts[bins])
    negative = np.int64(0)
    for i in range(bins):
        negative += np.int64(counts[i])
    positive = values.size - zeros - negative
    parts = most - (1 if zeros else 0)
    below = 0
    if negative:
        below = max((2 * parts * negative + negative + positive) // (2 * (negative + positive)), 1)
        below = min(below, parts - (1 if positive else 0))
    level = 0
    if negative:
        level = _cut(counts, 0, bins, below, lookup, level)
    if zeros:
        lookup[bins] = np.uint8(level)
        level += 1
    if positive:
        level = _cut(counts, bins + 1, 2 * bins + 1, parts - below, lookup, level)
    # Each bucket has two sums, so that equal neighbours need not wait for each other.
    sums = np.zeros((2, 256))
    sizes = np.zeros(256, np.int64)
    for i in range(values.size):
        level_i = lookup[_bin(values[i], floor, shift, bins)]
        levels[i] = level_i
        sums[i & 1, level_i] += values[i]
    for i in range(counts.size):
        if counts[i]:
            sizes[lookup[i]] += np.int64(counts[i])
    for i in range(level):
        table[i] = np.float32((sums[0, i] + sums[1, i]) / sizes[i])
    return level


@kernel("void(Array(uint8, 1, 'C', readonly=True), Array(float32, 1, 'C', readonly=True), float32[::1])")
def look_up(levels, table, out):
    """out[i] = table[levels[i]]. levels: uint8[k]; table: float32[256]; out: float32[k], written."""
    for i in range(out.size):
        out[i] = table[levels[i]]
