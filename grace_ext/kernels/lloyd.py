"""Uniform thresholds with a dead zone, and centroids: the search for the step on a histogram, and the quantizer.

A value belongs to level 0 if its magnitude is below `start`, else to level m = 1 + floor((magnitude - start) / step), with
its sign. Level 0 decodes to 0, and level m to the centroid of its magnitudes.

The bytes must be the same on every machine, so nothing here depends on a mathematics library: sums have a fixed order, and
logarithms are computed from the bits.
"""

import math

import numpy as np

from ._compile import kernel
from ._helpers import MAGNITUDE, log2, random32
from ._intrinsics import bits_of, float_of, helper

BINS = 2048
SAMPLE = 1 << 15  # number of values in the histogram
MOST = 127  # levels on each side
FRACTIONS = 16  # levels with a centroid of their own; the higher ones share the last
SMALLEST, LARGEST = 2.0**-120, 2.0**125  # the range of steps whose inverse is a normal float32
_BINS_PER_ERROR = 2.0  # bins in the target's root mean square error; a step is 3 of those or more
_RATIO = 1.25  # ratio of two successive steps that are tried


@kernel("void(Array(float32, 1, 'C', readonly=True), float64[::1])")
def moments(values, out):
    """Compute out = (sum of squares, smallest magnitude, largest magnitude) of float32[k], k >= 1, finite."""
    sums = np.zeros(16)
    low, high = MAGNITUDE, np.uint32(0)
    whole = values.size & ~15
    for start in range(0, whole, 16):
        part = values[start : start + 16]
        for i in range(16):
            x = np.float64(part[i])
            sums[i] += x * x
    for i in range(whole, values.size):
        x = np.float64(values[i])
        sums[i & 15] += x * x
    for i in range(values.size):
        u = np.uint32(bits_of(values[i]) & MAGNITUDE)
        low = min(low, u)
        high = max(high, u)
    out[0] = 0.0
    for i in range(16):
        out[0] += sums[i]
    out[1], out[2] = float_of(low), float_of(high)


@helper
def _below(sums, x):
    """Return count, sum and sum of squares (in bins) of the magnitudes below x (in bins). Bins count as evenly filled."""
    j = min(np.int64(x), BINS - 1)
    a, part = np.float64(j), min(x, np.float64(BINS)) - np.float64(j)
    n = (sums[0, j + 1] - sums[0, j]) * part
    middle = a + 0.5 * part
    return sums[0, j] + n, sums[1, j] + n * middle, sums[2, j] + n * (middle * middle + part * part / 12.0)


@helper
def _cost(sums, total, start, step, with_rate):
    """Return (sum of squared errors, bits of all levels) of the sample; lengths are in bins."""
    n0, s0, q0 = _below(sums, start)
    squares, bits = q0, 0.0
    if with_rate and n0 > 1:
        bits = -n0 * log2(n0)
    inside = sums[0, BINS]
    x = start
    for _ in range(MOST):
        if n0 >= inside:
            break
        x += step
        n1, s1, q1 = _below(sums, x)
        n, s, q = n1 - n0, s1 - s0, q1 - q0
        if n > 1e-9:
            squares += max(0.0, q - s * s / n)
            if with_rate:
                bits += n - (n * log2(n) if n > 1 else 0.0)  # and its sign
        n0, s0, q0 = n1, s1, q1
    if start + MOST * step >= BINS:
        squares += (total - inside) * step * step / 12.0  # beyond the histogram, but not beyond the levels
    if with_rate:
        bits += total * log2(total) + 32.0 * (total - n0)
    return squares, bits


@helper
def _start(shape, step, smallest):
    """Return the start: `shape` steps or, if shape < 0, the smallest magnitude, with a margin for rounding."""
    return max(0.0, smallest - step / 32.0) if shape < 0 else shape * step


@kernel(
    "int64(Array(float32, 1, 'C', readonly=True), Array(float64, 1, 'C', readonly=True), float64, float64[:,::1],"
    " float32[::1], uint8[::1])"
)
def choose_levels(values, moments, error, sums, grid, fractions):
    """Find the start and the step that need the fewest bits at a root mean square error of `error` times that of the values.

    values: float32[k]; moments: as above, not all zero; sums: float64[3, BINS + 1], to work in; grid: float32[2], written:
    start and step; fractions: uint8[FRACTIONS], written: where the centroids are in their intervals, in 1/256. Returns the
    number of levels on each side, at most MOST; the largest value may lie beyond them.
    """
    k = values.size
    width = error * math.sqrt(moments[0] / k) / _BINS_PER_ERROR
    width = min(max(width, SMALLEST), LARGEST / 1024)
    sums[:] = 0.0
    scale = np.float32(1.0 / width)
    n = min(k, SAMPLE)
    for s in range(n):
        first, last = s * k // n, (s + 1) * k // n
        i = first + np.int64(random32(np.uint32(s), np.uint32(0), np.uint32(0))) % (last - first)
        x = float_of(np.uint32(bits_of(values[i]) & MAGNITUDE)) * scale
        if x < np.float32(BINS):
            sums[0, np.int64(x) + 1] += 1.0
    for j in range(BINS):
        count, middle = sums[0, j + 1], j + 0.5
        sums[1, j + 1] = sums[1, j] + count * middle
        sums[2, j + 1] = sums[2, j] + count * (middle * middle + 1.0 / 12.0)
        sums[0, j + 1] += sums[0, j]
    # In bins: what the squared errors of the sample may sum to, and the smallest magnitude.
    total, target, smallest = np.float64(n), n * _BINS_PER_ERROR * _BINS_PER_ERROR, moments[1] / width
    best, start, step = np.inf, 0.0, 1.0
    widest = min(max(moments[2] / width, 2.0), 512.0)  # one step is enough for all
    for shape in (-1.0, 0.5, 0.6, 0.75):
        # The error need not grow with the step everywhere, so all steps are gone through.
        above, tried, last = 0.0, widest, 1.0
        while tried >= last:
            if _cost(sums, total, _start(shape, tried, smallest), tried, False)[0] > target:
                above = tried
            elif above > 0 or tried == widest:
                low, high = tried, max(above, tried)
                for _ in range(7):
                    middle = math.sqrt(low * high)
                    if _cost(sums, total, _start(shape, middle, smallest), middle, False)[0] > target:
                        high = middle
                    else:
                        low = middle
                bits = _cost(sums, total, _start(shape, low, smallest), low, True)[1]
                if bits < best:
                    best, start, step = bits, _start(shape, low, smallest), low
                above, last = 0.0, max(last, 0.3 * low)
            tried /= _RATIO
    n0, s0, _ = _below(sums, start)
    for m in range(FRACTIONS):
        lower = start + m * step
        upper = lower + step
        count = position = 0.0
        while True:  # the last one for all levels from there on
            n1, s1, _ = _below(sums, upper)
            count += n1 - n0
            position += (s1 - s0) - (n1 - n0) * lower
            n0, s0 = n1, s1
            if m < FRACTIONS - 1 or n1 >= sums[0, BINS] or upper >= BINS:
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


@kernel("void(Array(float32, 1, 'C', readonly=True), Array(float32, 1, 'C', readonly=True), int64, uint8[::1])")
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


@kernel("int64(Array(float32, 1, 'C', readonly=True), Array(uint8, 1, 'C', readonly=True), int64, float32[::1])")
def gather_escapes(values, codes, escape, out):
    """Write the values whose code is `escape` to out (float32[k]); returns how many."""
    j = 0
    for i in range(codes.size):
        if codes[i] == escape:
            out[j] = values[i]
            j += 1
    return j


@kernel(
    "boolean(Array(uint8, 1, 'C', readonly=True), Array(float32, 1, 'C', readonly=True),"
    " Array(float32, 1, 'C', readonly=True), float32[::1])"
)
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
