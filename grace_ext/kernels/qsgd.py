"""Stochastic uniform quantization of values in buckets: codes packed at up to 8 bits, or wide codes."""

import math

import numpy as np

from ._compile import kernel
from ._helpers import largest_magnitude, random32, spread, squeeze
from ._intrinsics import float_of, helper, load64, store64
from ._sums import sum_of_squares

_SMALLEST = np.float32(2.0**-119)  # below it, levels / norm would overflow; such a bucket is sent as zeros
_SMALLEST_WIDE = np.float32(2.0**-110)
_LARGEST = np.float32(3.4028e38)  # above it, a decoded value could round to Inf


@kernel("uint32(Array(float32, 1, 'C', readonly=True))")
def max_magnitude(values):
    """Return the bits of the largest magnitude in values; 0x7F800000 and above mean that one is Inf or NaN."""
    return largest_magnitude(values)


@helper
def _quantize(values, scale, levels, low, high, first, codes):
    top = np.float32(2.0) * levels
    for i in range(values.size):
        # 16 random bits and a half: levels + uniform is exact, so a zero stays one.
        uniform = np.float32(np.int32(random32(first + np.uint32(i), low, high) >> np.uint32(16))) + np.float32(0.5)
        x = values[i] * scale + (levels + uniform * np.float32(2.0**-16))
        codes[i] = np.uint8(np.int32(min(max(x, np.float32(0)), top)))


@helper
def _dequantize(codes, levels, scale, out):
    for i in range(out.size):
        out[i] = np.float32(np.int32(codes[i]) - levels) * scale


@helper
def _norm2(values, sums):
    """Return the 2-norm of float32[n]. sums: float64[16], scratch."""
    return np.float32(min(math.sqrt(sum_of_squares(values, sums)), np.float64(_LARGEST)))


@kernel(
    "void(Array(float32, 1, 'C', readonly=True), int64, int64, int64, boolean, uint32, uint32, float32[::1], uint8[::1])"
)
def qsgd_encode(values, levels, width, bucket, two_norm, key_low, key_high, norms, out):
    """Quantize finite values to levels -s..s of their bucket's largest magnitude or 2-norm, s = levels <= 127, unbiased.

    values: float32[k]; width: bits of a code, 2 * levels < 2**width <= 256; bucket: a multiple of 8; norms: float32[ceil(k /
    bucket)], written; out: uint8[k * width / 8 + 8], written: codes level + s, packed. The random numbers depend only on the
    key and the value's position.
    """
    s = np.float32(levels)
    codes = np.zeros(bucket, np.uint8)
    words = codes.view(np.uint64)
    sums = np.empty(16, np.float64)
    W = np.uint64(width)
    at = 0
    for b in range(norms.size):
        start = b * bucket
        part = values[start : min(values.size, start + bucket)]
        norm = _norm2(part, sums) if two_norm else min(float_of(largest_magnitude(part)), _LARGEST)
        if norm < _SMALLEST:
            norm = np.float32(0)
        norms[b] = norm
        scale = np.float32(s / norm) if norm > 0 else np.float32(0)
        _quantize(part, scale, s, key_low, key_high, np.uint32(start), codes)
        for w in range((part.size + 7) >> 3):
            if w == part.size >> 3:  # the last, partial word: no stale codes behind the values
                for i in range(part.size, 8 * w + 8):
                    codes[i] = np.uint8(0)
            store64(out, at, squeeze(words[w], W))
            at += width


@kernel(
    "boolean(Array(uint8, 1, 'C', readonly=True), int64, int64, int64, Array(float32, 1, 'C', readonly=True), float32[::1])"
)
def qsgd_decode(packed, levels, width, bucket, norms, out):
    """The inverse of qsgd_encode. Returns False if a code is out of range.

    packed: uint8[ceil(k * width / 8)], out: float32[k].
    """
    codes = np.zeros(bucket, np.uint8)
    words = codes.view(np.uint64)
    W = np.uint64(width)
    at = 0
    largest = np.uint8(0)
    for b in range(norms.size):
        start = b * bucket
        part = out[start : min(out.size, start + bucket)]
        for w in range((part.size + 7) >> 3):
            if at + 8 <= packed.size:  # word_at in full: with a call of it, this loop takes 1.7 times as long
                word = load64(packed, at)
            else:
                word = np.uint64(0)
                for i in range(packed.size - 1, at - 1, -1):
                    word = (word << np.uint64(8)) | np.uint64(packed[i])
            words[w] = spread(word, W)
            at += width
        for code in codes[: part.size]:
            largest = max(largest, code)
        _dequantize(codes, np.int32(levels), np.float32(norms[b] / np.float32(levels)), part)
    return largest <= 2 * levels


@kernel("void(Array(float32, 1, 'C', readonly=True), int64, int64, boolean, uint32, uint32, float32[::1], uint32[::1])")
def qsgd_encode_wide(values, levels, bucket, two_norm, key_low, key_high, norms, codes):
    """Like qsgd_encode for up to 32767 levels, in float64. codes: uint32[k], written: level + s each."""
    sums = np.empty(16, np.float64)
    s = np.float64(levels)
    for b in range(norms.size):
        start = b * bucket
        part = values[start : min(values.size, start + bucket)]
        norm = _norm2(part, sums) if two_norm else min(float_of(largest_magnitude(part)), _LARGEST)
        if norm < _SMALLEST_WIDE:
            norm = np.float32(0)
        norms[b] = norm
        scale = s / np.float64(norm) if norm > 0 else 0.0
        for i in range(part.size):
            uniform = (np.float64(random32(np.uint32(start + i), key_low, key_high)) + 0.5) * 2.0**-32
            codes[start + i] = np.uint32(min(max(np.float64(part[i]) * scale + (s + uniform), 0.0), s + s))


@kernel("boolean(Array(uint32, 1, 'C', readonly=True), int64, int64, Array(float32, 1, 'C', readonly=True), float32[::1])")
def qsgd_decode_wide(codes, levels, bucket, norms, out):
    """The inverse of qsgd_encode_wide. Returns False if a code is out of range."""
    largest = np.uint32(0)
    for b in range(norms.size):
        start = b * bucket
        scale = np.float32(norms[b] / np.float32(levels))
        for i in range(start, min(out.size, start + bucket)):
            largest = max(largest, codes[i])
            out[i] = np.float32(np.float32(np.int64(codes[i]) - levels) * scale)
    return np.int64(largest) <= 2 * levels
