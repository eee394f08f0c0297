"""Stochastic uniform quantization of values in buckets, packed at 2 to 8 bits."""

import numpy as np

from ._compile import kernel
from ._helpers import largest_magnitude, random32, spread, squeeze
from ._intrinsics import float_of, helper, load64, store64

_SMALLEST = np.float32(2.0**-119)  # below it, levels / norm would overflow; such a bucket is sent as zeros
_LARGEST = np.float32(3.4028e38)  # above it, a decoded value could round to Inf


@kernel("uint32(Array(float32, 1, 'C', readonly=True))")
def max_magnitude(values):
    """The bits of the largest magnitude in values; 0x7F800000 and above mean that one is Inf or NaN."""
    return largest_magnitude(values)


@helper
def _quantize(values, scale, levels, low, high, first, codes):
    top = np.float32(2.0) * levels
    for i in range(values.size):
        # 16 random bits and a half: levels + uniform is exact, and so is the zero of a zero.
        uniform = np.float32(np.int32(random32(first + np.uint32(i), low, high) >> np.uint32(16))) + np.float32(0.5)
        x = values[i] * scale + (levels + uniform * np.float32(2.0**-16))
        codes[i] = np.uint8(np.int32(min(max(x, np.float32(0)), top)))


@helper
def _dequantize(codes, levels, scale, out):
    for i in range(out.size):
        out[i] = np.float32(np.int32(codes[i]) - levels) * scale


@kernel("void(Array(float32, 1, 'C', readonly=True), int64, int64, uint32, uint32, float32[::1], uint8[::1])")
def qsgd_encode(values, bits, bucket, key_low, key_high, norms, out):
    """Quantize finite values to levels -s..s of their bucket's largest magnitude, s = 2**(bits-1) - 1, unbiased.

    values: float32[k]; bucket: a multiple of 8; norms: float32[ceil(k / bucket)], written; out: uint8[k * bits / 8 + 8],
    written: codes level + s, packed at `bits` bits. The random numbers depend on the key and the value's place only.
    """
    levels = np.float32((1 << (bits - 1)) - 1)
    codes = np.zeros(bucket, np.uint8)
    words = codes.view(np.uint64)
    B = np.uint64(bits)
    at = 0
    for b in range(norms.size):
        start = b * bucket
        part = values[start:min(values.size, start + bucket)]
        norm = min(float_of(largest_magnitude(part)), _LARGEST)
        if norm < _SMALLEST:
            norm = np.float32(0)
        norms[b] = norm
        scale = np.float32(levels / norm) if norm > 0 else np.float32(0)
        _quantize(part, scale, levels, key_low, key_high, np.uint32(start), codes)
        for w in range((part.size + 7) >> 3):
            if w == part.size >> 3:  # the last, partial word: no stale codes behind the values
                for i in range(part.size, 8 * w + 8):
                    codes[i] = np.uint8(0)
            store64(out, at, squeeze(words[w], B))
            at += bits


@kernel("boolean(Array(uint8, 1, 'C', readonly=True), int64, int64, Array(float32, 1, 'C', readonly=True), float32[::1])")
def qsgd_decode(packed, bits, bucket, norms, out):
    """The inverse of qsgd_encode. packed: uint8[ceil(k * bits / 8)], out: float32[k]. False if a code is out of range."""
    levels = (1 << (bits - 1)) - 1
    codes = np.zeros(bucket, np.uint8)
    words = codes.view(np.uint64)
    B = np.uint64(bits)
    at = 0
    largest = np.uint8(0)
    for b in range(norms.size):
        start = b * bucket
        part = out[start:min(out.size, start + bucket)]
        for w in range((part.size + 7) >> 3):
            if at + 8 <= packed.size:
                word = load64(packed, at)
            else:
                word = np.uint64(0)
                for i in range(packed.size - 1, at - 1, -1):
                    word = (word << np.uint64(8)) | np.uint64(packed[i])
            words[w] = spread(word, B)
            at += bits
        for code in codes[:part.size]:
            largest = max(largest, code)
        _dequantize(codes, np.int32(levels), np.float32(norms[b] / np.float32(levels)), part)
    return largest <= 2 * levels
