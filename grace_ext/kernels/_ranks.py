"""Magnitudes by their rank: the k-th largest, and bounds for it from a sample."""

import math

import numpy as np

from ._helpers import MAGNITUDE
from ._intrinsics import bits_of, helper

BINS = 2048


@helper
def kth_largest(bits, n, k, histogram):
    """Return the k-th largest magnitude (1-based) among bits[:n], and how many are strictly larger; by 11 + 11 + 9 bits."""
    larger = 0
    prefix = np.uint32(0)
    for shift, width in ((np.uint32(20), np.uint32(11)), (np.uint32(9), np.uint32(11)), (np.uint32(0), np.uint32(9))):
        histogram[:] = 0
        above = np.uint32(shift + width)
        low = np.uint32((np.uint32(1) << width) - np.uint32(1))
        for i in range(n):
            x = np.uint32(bits[i] & MAGNITUDE)
            if shift == 20 or (x >> above) == prefix:
                histogram[(x >> shift) & low] += 1
        bin_ = np.int64(low)
        while larger + histogram[bin_] < k:
            larger += histogram[bin_]
            bin_ -= 1
        prefix = np.uint32((prefix << width) | np.uint32(bin_))
    return prefix, larger


@helper
def sample_lines(gradient, residual, fused, out):
    """Fill `out` with the bits of randomly placed lines of 16 elements, one from each of equal strata. Returns the count."""
    whole = gradient.size // 16
    lines = min(out.size // 16, whole)
    state = np.uint64(0x9E3779B97F4A7C15)
    n = 0
    for s in range(lines):
        first = s * whole // lines
        last = (s + 1) * whole // lines
        state ^= state << np.uint64(13)
        state ^= state >> np.uint64(7)
        state ^= state << np.uint64(17)
        start = (first + np.int64((state >> np.uint64(33)) % np.uint64(last - first))) * 16
        for i in range(start, start + 16):
            x = gradient[i]
            if fused:
                x = np.float32(x + residual[i])
            out[n] = bits_of(x)
            n += 1
    return n


@helper
def find_bin(histogram, rank):
    """Return the bin that holds the rank-th largest (1-based), and how many are in the bins above it."""
    bin_ = histogram.size - 1
    above = 0
    while above + histogram[bin_] < rank:
        above += histogram[bin_]
        bin_ -= 1
    return bin_, above


@helper
def refine(sample, n, bin_, rank, histogram):
    """Return the rank-th largest magnitude of those in one bin of the first histogram, without its last 9 bits."""
    histogram[:] = 0
    for i in range(n):
        x = np.uint32(sample[i] & MAGNITUDE)
        if np.int64(x >> np.uint32(20)) == bin_:
            histogram[(x >> np.uint32(9)) & np.uint32(BINS - 1)] += 1
    return np.uint32(np.uint32(np.uint32(bin_) << np.uint32(11)) | np.uint32(find_bin(histogram, rank)[0])) << np.uint32(9)


@helper
def bounds(sample, n, k, d, histogram):
    """Return magnitudes that bracket the k-th largest of the tensor with 4 sigma; the lower one is at least 1 (no zeros)."""
    if n == 0:
        return np.uint32(1), MAGNITUDE
    rank = k / d * n
    margin = 4.0 * math.sqrt(2.0 * rank) + 8.0
    deep, high = np.int64(rank + margin), np.int64(rank - margin)
    histogram[:] = 0
    for i in range(n):
        histogram[(sample[i] & MAGNITUDE) >> np.uint32(20)] += 1
    deep_bin, deep_above = find_bin(histogram, min(deep, n))
    high_bin, high_above = find_bin(histogram, max(high, 1))
    lower, upper = np.uint32(1), MAGNITUDE
    if deep < n:
        lower = max(lower, np.uint32(refine(sample, n, deep_bin, deep - deep_above, histogram)))
    if high >= 1:
        upper = np.uint32(refine(sample, n, high_bin, high - high_above, histogram) | np.uint32(511))
    return lower, max(lower, upper)
