"""Stable radix argsort of float32 by its bits."""

import numpy as np

from ._compile import kernel
from ._intrinsics import bits_of, float_of

BITS = 11  # a digit: three of them cover 32 bits, and 2048 write positions stay in the L1 cache
_MASK = np.uint32((1 << BITS) - 1)
_LOW = np.uint64(0xFFFFFFFF)


@kernel("int64(Array(float32, 1, 'C', readonly=True), uint64[::1], uint64[::1], uint32[::1], float32[::1])")
def argsort_bits(values, work, spare, order, ordered):
    """Sort by the values' bits as uint32: first those without a sign, then those with one, each by ascending magnitude.

    Equal bits keep their order. values: float32[k], k < 2**32; work, spare: uint64[k], overwritten; order: uint32[k] and
    ordered: float32[k], written: ordered[i] = values[order[i]]. Returns how many have no sign.
    """
    n = values.size
    counts = np.zeros((3, 1 << BITS), np.uint32)
    for i in range(n):
        x = bits_of(values[i])
        work[i] = np.uint64(x) << np.uint64(32) | np.uint64(i)
        counts[0, x & _MASK] += np.uint32(1)
        counts[1, x >> np.uint32(BITS) & _MASK] += np.uint32(1)
        counts[2, x >> np.uint32(2 * BITS)] += np.uint32(1)
    for digit in range(3):
        at = counts[digit]
        total = np.uint32(0)
        largest = np.uint32(0)
        for b in range(at.size):
            count = at[b]
            largest = max(largest, count)
            at[b] = total
            total += count
        if largest == n:
            continue  # all are equal in this digit
        shift = np.uint64(32 + digit * BITS)
        for i in range(n):
            x = work[i]
            bucket = x >> shift & np.uint64(_MASK)
            spare[at[bucket]] = x
            at[bucket] += np.uint32(1)
        work, spare = spare, work
    unsigned = 0
    for i in range(n):
        x = work[i]
        order[i] = np.uint32(x & _LOW)
        ordered[i] = float_of(np.uint32(x >> np.uint64(32)))
        unsigned += np.int64(x >> np.uint64(63) == np.uint64(0))
    return unsigned
