"""One bit for each value: its sign; and the mean of the values of each sign."""

import numpy as np

from ._compile import kernel
from ._intrinsics import choose16, helper, negative16, popcount

LANES = 16


@helper
def _mean(total, count):
    return np.float32(total / count) if count > 0 else np.float32(0)


@kernel("void(Array(float32, 1, 'C', readonly=True), int64, float32[:, ::1], uint8[::1])")
def onebit_encode(values, bucket, means, bits):
    """Encode float32[k], finite, as signs and means.

    bucket: a multiple of 8, or k or more; means: float32[ceil(k / bucket), 2], written: of the values not below 0 and of
    those below; bits: uint8[ceil(k / 8)], written: 1 for those below. Sums run in float64 over 16 lanes, whatever the CPU,
    so that the means are the same on all machines.
    """
    sums = np.empty((2, LANES), np.float64)
    bits[:] = np.uint8(0)
    for b in range(means.shape[0]):
        start, end = b * bucket, min(values.size, (b + 1) * bucket)
        part = values[start:end]
        into = bits[start >> 3 : (end + 7) >> 3]
        sums[:] = 0.0
        negative = 0
        whole = part.size // LANES
        for row in range(whole):
            mask = negative16(part, row * LANES)
            into[2 * row] = np.uint8(mask & np.uint64(0xFF))
            into[2 * row + 1] = np.uint8(mask >> np.uint64(8))
            negative += np.int64(popcount(mask))
            lanes = part[row * LANES : (row + 1) * LANES]
            for j in range(LANES):
                x = np.float64(lanes[j])
                sums[0, j] += max(x, 0.0)
                sums[1, j] += min(x, 0.0)
        for i in range(whole * LANES, part.size):
            x = np.float64(part[i])
            sums[0, i % LANES] += max(x, 0.0)
            sums[1, i % LANES] += min(x, 0.0)
            if x < 0.0:
                into[i >> 3] |= np.uint8(1 << (i & 7))
                negative += 1
        for j in range(1, LANES):
            sums[0, 0] += sums[0, j]
            sums[1, 0] += sums[1, j]
        means[b, 0] = _mean(sums[0, 0], part.size - negative)
        means[b, 1] = _mean(sums[1, 0], negative)


@kernel("void(Array(uint8, 1, 'C', readonly=True), int64, Array(float32, 2, 'C', readonly=True), float32[::1])")
def onebit_decode(bits, bucket, means, out):
    """The inverse of onebit_encode. bits: uint8[ceil(k / 8)], out: float32[k]."""
    for b in range(means.shape[0]):
        start, end = b * bucket, min(out.size, (b + 1) * bucket)
        part, source = out[start:end], bits[start >> 3 : (end + 7) >> 3]
        above, below = means[b, 0], means[b, 1]
        whole = part.size // LANES
        for row in range(whole):
            choose16(
                np.uint64(source[2 * row]) | (np.uint64(source[2 * row + 1]) << np.uint64(8)),
                above,
                below,
                part,
                row * LANES,
            )
        for i in range(whole * LANES, part.size):
            part[i] = below if (source[i >> 3] >> (i & 7)) & 1 else above
