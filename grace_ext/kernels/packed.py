"""float32 to 8 bits with a scale for each block, and to bfloat16, both rounded at random: for states that are kept.

What was packed and unpacked once stays the same when it is packed again: a state that is saved as float32 is not changed by
that. The random numbers are a hash of the value's bits and its position, so that the result depends on nothing else.
"""

import numpy as np

from ._compile import kernel
from ._helpers import MAGNITUDE, largest_magnitude, random32
from ._intrinsics import bits_of, float_of, helper

BLOCK = 128  # elements with one scale
_LARGEST = np.uint32(0x7F7FFFFF)  # the bits of the largest finite float32
_NEARLY_LARGEST = np.uint32(0x7F7E0000)  # those of 127 * 2**121
_SMALLEST = np.uint32(8 << 23)  # those of 2**-119


@helper
def _random16(bits, position):
    """A hash of 16 bits, uint32."""
    return np.uint32(random32(np.uint32(position), bits, np.uint32(0)) >> np.uint32(16))


@helper
def _scale_of(block):
    """The smallest power of two with which the magnitudes of a block are at most 127, and its inverse; 0 and 0: see pack8."""
    largest = largest_magnitude(block)
    # 127 steps of 2**(e - 6) reach up to mantissas of 127 / 64, for magnitudes from 2**e on. 64 of 2**122 would be Inf.
    reaches = np.uint32(largest & np.uint32(0x7FFFFF)) <= np.uint32(0x7E0000) or largest > _NEARLY_LARGEST
    lower = np.uint32(6) if reaches else np.uint32(5)
    exponent = np.uint32(np.uint32(largest >> np.uint32(23)) - lower)
    if not _SMALLEST <= largest <= _LARGEST:
        return np.float32(0), np.float32(0)
    return (
        float_of(np.uint32(exponent << np.uint32(23))),
        float_of(np.uint32(np.uint32(np.uint32(254) - exponent) << np.uint32(23))),
    )


@helper
def _pack_block(block, start, inverse, codes):
    for i in range(block.size):
        random = np.float32(_random16(bits_of(block[i]), start + i)) * np.float32(2**-16)
        code = min(max(np.floor(block[i] * inverse + random), np.float32(-127)), np.float32(127))
        codes[i] = np.int8(np.int32(code))


@kernel("void(Array(float32, 1, 'C', readonly=True), int8[::1], float32[::1])")
def pack8(values, codes, scales):
    """codes = values / scale, rounded to one of both neighbors, with the nearer one's probability, so that the mean is exact.

    values: float32[d]; codes: int8[d]; scales: float32[ceil(d / BLOCK)], the smallest power of two with which the magnitudes
    of a block are at most 127, or 2**121. A block with a value that is not finite, or without one from 2**-119 on, becomes zeros.
    """
    for block in range(scales.size):
        start = block * BLOCK
        part, packed = values[start : start + BLOCK], codes[start : start + BLOCK]
        scale, inverse = _scale_of(part)
        scales[block] = scale
        if scale:
            _pack_block(part, start, inverse, packed)
        else:
            packed[:] = 0


@kernel("void(Array(int8, 1, 'C', readonly=True), Array(float32, 1, 'C', readonly=True), float32[::1])")
def unpack8(codes, scales, out):
    """out = codes * scale. codes: int8[d]; scales: float32[ceil(d / BLOCK)]; out: float32[d]."""
    for block in range(scales.size):
        scale, start = scales[block], block * BLOCK
        packed, part = codes[start : start + BLOCK], out[start : start + BLOCK]
        for i in range(part.size):
            part[i] = np.float32(packed[i]) * scale


@kernel("void(Array(float32, 1, 'C', readonly=True), uint16[::1])")
def pack16(values, halves):
    """The bits of bfloat16[d], rounded to one of both neighbors as in `pack8`; never to Inf. values: float32[d]."""
    for i in range(values.size):
        x = bits_of(values[i])
        magnitude = np.uint32(np.uint32(x & MAGNITUDE) + _random16(x, i))
        magnitude = magnitude if magnitude < _LARGEST else _LARGEST
        halves[i] = np.uint16(np.uint32(np.uint32(magnitude | np.uint32(x & np.uint32(0x80000000))) >> np.uint32(16)))
