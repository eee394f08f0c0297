"""float32 to 16 bits and back, by plain bit arithmetic: it vectorises on every CPU, also on those without conversions."""

import numpy as np

from ._compile import kernel
from ._helpers import MAGNITUDE
from ._intrinsics import bits_of, float_of


@kernel("uint32(Array(float32, 1, 'C', readonly=True), float32, uint16[::1])")
def fp16_encode(values, limit, out):
    """Convert float32[k] to the bits of float16[k], rounded to nearest even.

    Magnitudes above the limit (at most 65504) become it. Returns the bits of the largest magnitude in values: 0x7F800000 and
    above mean that one is Inf or NaN.
    """
    cap = bits_of(limit)
    largest = np.uint32(0)
    for i in range(values.size):
        x = bits_of(values[i])
        magnitude = np.uint32(x & MAGNITUDE)
        largest = magnitude if magnitude > largest else largest
        magnitude = magnitude if magnitude < cap else cap
        # Below 2**-14, half a unit of the float 0.5 is half a unit of a subnormal half, so the sum rounds as required.
        small = np.uint32(bits_of(np.float32(float_of(magnitude) + np.float32(0.5))) - np.uint32(0x3F000000))
        odd = np.uint32(np.uint32(magnitude >> np.uint32(13)) & np.uint32(1))
        # Otherwise the exponent's bias goes from 127 to 15, and half a unit, less one bit if that breaks a tie, is added.
        normal = np.uint32(np.uint32(np.uint32(magnitude + np.uint32(0xC8000FFF)) + odd) >> np.uint32(13))
        half = small if magnitude < np.uint32(0x38800000) else normal
        out[i] = np.uint16(np.uint32(half | np.uint32(np.uint32(x >> np.uint32(16)) & np.uint32(0x8000))))
    return largest


@kernel("void(Array(uint16, 1, 'C', readonly=True, aligned=False), float32[::1])")
def fp16_decode(halves, out):
    """Convert the bits of float16[k] to float32[k]."""
    first = float_of(np.uint32(0x38800000))  # the smallest normal half
    for i in range(out.size):
        half = np.uint32(halves[i])
        x = np.uint32(np.uint32(half & np.uint32(0x7FFF)) << np.uint32(13))
        exponent = np.uint32(x & np.uint32(0x0F800000))
        small = bits_of(np.float32(float_of(np.uint32(x + np.uint32(0x38800000))) - first))
        bias = np.uint32(0x70000000) if exponent == np.uint32(0x0F800000) else np.uint32(0x38000000)
        x = small if exponent == np.uint32(0) else np.uint32(x + bias)
        out[i] = float_of(np.uint32(x | np.uint32(np.uint32(half & np.uint32(0x8000)) << np.uint32(16))))


@kernel("void(Array(float32, 1, 'C', readonly=True), uint16[::1])")
def bf16_encode(values, out):
    """Convert finite float32[k] to the bits of bfloat16[k], rounded to nearest even, but to the largest instead of Inf."""
    for i in range(values.size):
        x = bits_of(values[i])
        magnitude = np.uint32(x & MAGNITUDE)
        magnitude = magnitude if magnitude < np.uint32(0x7F7F0000) else np.uint32(0x7F7F0000)
        odd = np.uint32(np.uint32(magnitude >> np.uint32(16)) & np.uint32(1))
        magnitude = np.uint32(np.uint32(np.uint32(magnitude + np.uint32(0x7FFF)) + odd) >> np.uint32(16))
        out[i] = np.uint16(np.uint32(magnitude | np.uint32(np.uint32(x >> np.uint32(16)) & np.uint32(0x8000))))


@kernel("void(Array(uint16, 1, 'C', readonly=True, aligned=False), float32[::1])")
def bf16_decode(halves, out):
    """Convert the bits of bfloat16[k] to float32[k]."""
    for i in range(out.size):
        out[i] = float_of(np.uint32(np.uint32(halves[i]) << np.uint32(16)))
