"""Affine quantization: levels between the smallest and the largest value of a chunk.

Everything is in float64, in which the difference of two float32 neither overflows nor vanishes.
"""

import numpy as np

from ._compile import kernel
from ._intrinsics import bits_of, float_of, helper


@helper
def _ordered(x):
    """Map float32 bits to an int32 in the order of the values, or back. Integers, because float minima do not vectorise."""
    return np.int32(np.int32(x) ^ np.int32(np.int32(np.int32(x) >> np.int32(31)) & np.int32(0x7FFFFFFF)))


@helper
def _range(values):
    low, high = np.int32(0x7FFFFFFF), np.int32(-0x80000000)
    for i in range(values.size):
        x = _ordered(bits_of(values[i]))
        low = x if x < low else low
        high = x if x > high else high
    return float_of(np.uint32(_ordered(low))), float_of(np.uint32(_ordered(high)))


@helper
def _quantize(values, low, scale, levels):
    for i in range(values.size):
        levels[i] = np.uint8(np.int32((np.float64(values[i]) - low) * scale + 0.5))


@helper
def _dequantize(levels, low, step, out):
    for i in range(out.size):
        out[i] = np.float32(low + np.float64(np.int32(levels[i])) * step)


@kernel("void(Array(float32, 1, 'C', readonly=True), int64, int64, float32[:, ::1], uint8[::1])")
def minmax_encode(values, chunk, top, ranges, levels):
    """Quantize finite values to the nearest of levels 0..top between the extremes of their chunk.

    values: float32[k]; top: 1 to 255; ranges: float32[ceil(k / chunk), 2], written: smallest and largest value;
    levels: uint8[k], written.
    """
    for c in range(ranges.shape[0]):
        start, end = c * chunk, min(values.size, (c + 1) * chunk)
        low, high = _range(values[start:end])
        ranges[c, 0], ranges[c, 1] = low, high
        width = np.float64(high) - np.float64(low)
        _quantize(values[start:end], np.float64(low), top / width if width > 0 else 0.0, levels[start:end])


@kernel("void(Array(uint8, 1, 'C', readonly=True), int64, int64, Array(float32, 2, 'C', readonly=True), float32[::1])")
def minmax_decode(levels, chunk, top, ranges, out):
    """Decode: low + level * ((high - low) / top) in float64, rounded to float32. The arrays are those of minmax_encode."""
    for c in range(ranges.shape[0]):
        start, end = c * chunk, min(out.size, (c + 1) * chunk)
        low = np.float64(ranges[c, 0])
        _dequantize(levels[start:end], low, (np.float64(ranges[c, 1]) - low) / top, out[start:end])
