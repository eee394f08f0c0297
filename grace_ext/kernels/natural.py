"""Stochastic rounding to powers of two, on the bits of the floats."""

import numpy as np

from ._compile import kernel
from ._helpers import magnitude_range, random32
from ._intrinsics import bits_of, float_of

_MANTISSA = np.uint32(0x7FFFFF)


@kernel("UniTuple(uint32, 2)(Array(float32, 1, 'C', readonly=True))")
def nonzero_range(values):
    """Return the bits of the smallest and of the largest magnitude in float32[k] that are not 0; (0, 0) if all are."""
    return magnitude_range(values)


@kernel("void(Array(float32, 1, 'C', readonly=True), uint32, uint32, uint32, uint32, uint8[::1])")
def natural_encode(values, lowest, count, key_low, key_high, levels):
    """Round finite values to 0 and the powers of two with biased exponents lowest .. lowest + count - 1, unbiased.

    values: float32[k]; a magnitude above the largest power becomes that. lowest >= 1; levels: uint8[k], written: `count` for
    0, count +- (1 + exponent - lowest) for a power. The random numbers depend only on the key and the value's position.
    """
    for i in range(values.size):
        x = bits_of(values[i])
        exponent = np.uint32(np.uint32(x >> np.uint32(23)) & np.uint32(0xFF))
        mantissa = np.uint32(np.uint32(x & _MANTISSA) | (np.uint32(0x800000) if exponent > np.uint32(0) else np.uint32(0)))
        exponent = exponent if exponent > np.uint32(1) else np.uint32(1)
        # The value is mantissa / 2**23 times the power of its exponent or, below `lowest`, times that power.
        above = np.int32(np.int32(exponent) - np.int32(lowest))
        shift = np.uint32(-above) if above < np.int32(0) else np.uint32(0)
        mantissa = np.uint32(mantissa >> (shift if shift < np.uint32(31) else np.uint32(31)))
        # A random number of 23 bits carries into the next bit with the probability that the fraction gives.
        carried = np.uint32(mantissa + np.uint32(random32(np.uint32(i), key_low, key_high) >> np.uint32(9)))
        power = np.int32((above if above > np.int32(0) else np.int32(0)) + np.int32(carried >> np.uint32(23)))
        power = power if power < np.int32(count) else np.int32(count)
        levels[i] = np.uint8(np.int32(np.int32(count) + (-power if x >= np.uint32(0x80000000) else power)))


@kernel("void(Array(uint8, 1, 'C', readonly=True), uint32, uint32, float32[::1])")
def natural_decode(levels, lowest, zero, out):
    """The inverse of natural_encode. levels: uint8[k], at most 255 - lowest away from `zero`; out: float32[k], written."""
    first = np.uint32(lowest - np.uint32(1))
    for i in range(out.size):
        level = np.uint32(levels[i])
        above, below = np.uint32(level - zero), np.uint32(zero - level)  # one of them is negative
        power = below if level < zero else above
        x = np.uint32(np.uint32(power + first) << np.uint32(23))
        x = np.uint32(0) if level == zero else x
        out[i] = float_of(np.uint32(x | np.uint32(above & np.uint32(0x80000000))))
