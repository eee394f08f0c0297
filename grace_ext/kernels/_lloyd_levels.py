"""Uniform thresholds with a dead zone, and centroids: the search for the step on a histogram.

A value belongs to level 0 if its magnitude is below `start`, else to level m = 1 + floor((magnitude - start) / step), with
its sign. Level 0 decodes to 0, and level m to the centroid of its magnitudes.

The bytes must be the same on every machine, so nothing here depends on a mathematics library: sums have a fixed order, and
logarithms are computed from the bits.
"""

import math

import numpy as np

from ._helpers import MAGNITUDE, log2, random32
from ._intrinsics import bits_of, float_of, helper, numpy_helper
from ._sums import sum_of_block_squares

BINS = 2048
SAMPLE = 1 << 15  # number of values in the histogram
MOST = 127  # levels on each side
FRACTIONS = 16  # levels with a centroid of their own; the higher ones share the last
SMALLEST, LARGEST = 2.0**-120, 2.0**125  # the range of steps whose inverse is a normal float32
_BINS_PER_ERROR = 2.0  # bins in the target's root mean square error; a step is 3 of those or more
_SHAPES = (-1.0, 0.5, 0.6, 0.75)  # of the dead zone; see _start
_FIRST = 7.0  # the first step that is tried, in bins: it gives evenly spread values about the target's error
_TRIES = 9
_BEYOND = (1.06, 1.12, 1.2)  # larger steps that are tried at the end
_1 = np.uint64(1)


@helper
def moments(values, out):
    """Compute out = (sum of squares, smallest magnitude, largest magnitude) of float32[k], k >= 1, finite."""
    low, high = MAGNITUDE, np.uint32(0)
    out[0] = sum_of_block_squares(values)
    for i in range(values.size):
        u = np.uint32(bits_of(values[i]) & MAGNITUDE)
        low = min(low, u)
        high = max(high, u)
    out[1], out[2] = float_of(low), float_of(high)


@helper
def _count(values, width, sums):
    """Count the magnitudes in each bin: sums, float64[bins + 1, 3], zeroed; sums[j + 1, 0] is the count of bin j.

    Returns the number of values that were counted: all, or a sample.
    """
    k, scale = values.size, np.float32(1.0 / width)
    n = min(k, SAMPLE)
    for s in range(n):
        i = s
        if n < k:
            first, last = s * k // n, (s + 1) * k // n
            i = first + np.int64(random32(np.uint32(s), np.uint32(0), np.uint32(0))) % (last - first)
        x = float_of(np.uint32(bits_of(values[i]) & MAGNITUDE)) * scale
        if x < np.float32(BINS):
            sums[np.uint64(x) + _1, 0] += 1.0
    return n


@helper
def _cumulate(sums, bins):
    """Make of the counts the count, the sum and the sum of squares (in bins) of the magnitudes below each bin."""
    count = total = squares = 0.0
    for j in range(bins):
        here, middle = sums[j + 1, 0], j + 0.5
        count += here
        total += here * middle
        squares += here * (middle * middle + 1.0 / 12.0)
        sums[j + 1, 0], sums[j + 1, 1], sums[j + 1, 2] = count, total, squares


@helper
def _below(sums, bins, x):
    """Return count, sum and sum of squares (in bins) of the magnitudes below x (in bins). Bins count as evenly filled."""
    j = min(np.int64(x), bins - 1)
    row, a = np.uint64(j), np.float64(j)
    part = min(x, np.float64(bins)) - a
    n = (sums[row + _1, 0] - sums[row, 0]) * part
    middle = a + 0.5 * part
    return sums[row, 0] + n, sums[row, 1] + n * middle, sums[row, 2] + n * (middle * middle + part * part / 12.0)


@numpy_helper
def _squares(sums, bins, total, start, step, most):
    """Return the sum of squared errors of the sample or, where it is above `most`, another number above it, in bins."""
    n0, s0, q0 = _below(sums, bins, start)
    squares = q0
    inside = sums[np.uint64(bins), 0]
    x = start
    for _ in range(MOST):
        if n0 >= inside or squares > most:
            break
        x += step
        n1, s1, q1 = _below(sums, bins, x)
        n, s, q = n1 - n0, s1 - s0, q1 - q0
        if n > 1e-9:
            squares += max(0.0, q - s * s / n)
        n0, s0, q0 = n1, s1, q1
    if start + MOST * step >= BINS:
        squares += (total - inside) * step * step / 12.0  # beyond the histogram, but not beyond the levels
    return squares


@helper
def _rate(sums, bins, total, start, step):
    """Return the bits of all levels of the sample."""
    n0, _, _ = _below(sums, bins, start)
    bits = -n0 * log2(n0) if n0 > 1 else 0.0
    inside = sums[np.uint64(bins), 0]
    x = start
    for _ in range(MOST):
        if n0 >= inside:
            break
        x += step
        n1, _, _ = _below(sums, bins, x)
        n = n1 - n0
        if n > 1e-9:
            bits += n - (n * log2(n) if n > 1 else 0.0)  # and its sign
        n0 = n1
    return bits + (total * log2(total) + 32.0 * (total - n0))


@helper
def _start(shape, step, smallest):
    """Return the start: `shape` steps or, if shape < 0, the smallest magnitude, with a margin for rounding."""
    return max(0.0, smallest - step / 32.0) if shape < 0 else shape * step


@helper
def _search(sums, bins, total, target, smallest, widest):
    """Return the start and the step, in bins, with the fewest bits among those whose squared errors are at most `target`.

    The next step to be tried is the one that would meet the target if the errors grew with the square of the step.
    """
    best, start, step, low = np.inf, 0.0, 1.0, _FIRST
    for shape in _SHAPES:
        tried, low = min(low, widest), 0.0
        if _squares(sums, bins, total, _start(shape, widest, smallest), widest, target) <= target:
            low = widest
        for left in range(_TRIES, 0, -1):
            if low == widest:
                break
            squares = _squares(sums, bins, total, _start(shape, tried, smallest), tried, 4.0 * target)
            if squares <= target:
                low = max(low, tried)
                if squares > 0.98 * target:
                    break
            if low > 0 and left <= _TRIES - 3:
                break
            tried = min(tried * math.sqrt(min(max(0.995 * target / max(squares, 1e-9), 0.25), 4.0)), widest)
        low = max(low, 1.0)
        for ratio in _BEYOND:  # the errors need not grow with the step everywhere
            tried = min(ratio * low, widest)
            if _squares(sums, bins, total, _start(shape, tried, smallest), tried, target) <= target:
                low = tried
        bits = _rate(sums, bins, total, _start(shape, low, smallest), low)
        if bits < best:
            best, start, step = bits, _start(shape, low, smallest), low
    return start, step


@helper
def choose_levels(values, moments, error, grid, fractions):
    """Find the start and the step that need the fewest bits at a root mean square error of `error` times that of the values.

    values: float32[k]; moments: as above, not all zero; grid: float32[2], written: start and step; fractions:
    uint8[FRACTIONS], written: where the centroids are in their intervals, in 1/256. Returns the number of levels on each side,
    at most MOST; the largest value may lie beyond them.
    """
    width = bin_width(moments, values.size, error)
    bins = used_bins(moments, width)
    sums = np.zeros((bins + 1, 3))
    total = np.float64(_count(values, width, sums))
    return choose_by_counts(sums, bins, total, moments, width, grid, fractions)


@helper
def bin_width(moments, k, error):
    """Return the width of a bin for k values."""
    width = error * math.sqrt(moments[0] / k) / _BINS_PER_ERROR
    return min(max(width, SMALLEST), LARGEST / 1024)


@helper
def used_bins(moments, width):
    """Return the number of bins up to the last one with a value; values beyond it are as if they were there."""
    return 1 + np.int64(min(np.float32(moments[2]) * np.float32(1.0 / width), np.float32(BINS - 1)))


@helper
def choose_by_counts(sums, bins, total, moments, width, grid, fractions):
    """See choose_levels. sums: the counts, see _count; total: how many values were counted."""
    _cumulate(sums, bins)
    # In bins: what the squared errors of the sample may sum to, and where the bin with the smallest magnitude begins. A start
    # within the bin would count a part of its values as zeros.
    target, smallest = total * _BINS_PER_ERROR * _BINS_PER_ERROR, np.floor(moments[1] / width)
    widest = min(max(moments[2] / width, 2.0), 512.0)  # one step is enough for all
    start, step = _search(sums, bins, total, target, smallest, widest)
    n0, s0, _ = _below(sums, bins, start)
    for m in range(FRACTIONS):
        lower = start + m * step
        upper = lower + step
        count = position = 0.0
        while True:  # the last one for all levels from there on
            n1, s1, _ = _below(sums, bins, upper)
            count += n1 - n0
            position += (s1 - s0) - (n1 - n0) * lower
            n0, s0 = n1, s1
            if m < FRACTIONS - 1 or n1 >= sums[bins, 0] or upper >= BINS:
                break
            lower, upper = upper, upper + step
        f = position / (count * step) if count > 1e-9 else 0.5
        fractions[m] = np.uint8(min(max(np.int64(f * 256.0), 0), 255))
    grid[0], grid[1] = np.float32(start * width), np.float32(step * width)
    return min(MOST, np.int64(min(_place(np.float32(moments[2]), grid), np.float32(MOST + 1))))


@helper
def _place(magnitude, grid):
    """Return a number whose whole part is the level of a magnitude; the level is 0 if the number is negative."""
    return magnitude * np.float32(np.float32(1) / grid[1]) + np.float32(np.float32(1) - grid[0] / grid[1])
