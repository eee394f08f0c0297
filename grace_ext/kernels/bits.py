"""Bitmaps, and unsigned integers packed at a fixed width, least significant bit first."""

import numpy as np

from ._compile import kernel
from ._helpers import word_at
from ._intrinsics import load64, popcount, trailing_zeros

_1, _2 = np.uint64(1), np.uint64(2)


@kernel("void(Array(uint32, 1, 'C', readonly=True), uint8[::1])")
def bitmap_encode(indices, out):
    """Set the bits `indices` in `out` (uint8, zeroed, long enough)."""
    for i in range(indices.size):
        x = indices[i]
        out[x >> np.uint32(3)] |= np.uint8(1) << np.uint8(x & np.uint32(7))


@kernel("int64(Array(uint8, 1, 'C', readonly=True), uint32[::1])")
def bitmap_decode(bitmap, out):
    """Write the positions of the set bits to `out`. Returns how many there are, or -1 if there are more than `out` holds."""
    j, start = np.int64(0), np.int64(0)
    while start + 8 <= bitmap.size and j + 64 <= out.size:
        word = load64(bitmap, start)
        count = popcount(word)
        base = np.uint64(8 * start)
        # Two positions are always written: a branch for each bit costs more where bits are rare.
        out[j] = np.uint32(base + trailing_zeros(word))
        word &= word - _1
        out[j + 1] = np.uint32(base + trailing_zeros(word))
        word &= word - _1
        if count > _2:
            i = j + 2
            while word:
                out[i] = np.uint32(base + trailing_zeros(word))
                word &= word - _1
                i += 1
        j += np.int64(count)
        start += 8
    while start < bitmap.size:
        word = word_at(bitmap, start)
        while word:
            if j == out.size:
                return -1
            out[j] = np.uint32(np.uint64(8 * start) + trailing_zeros(word))
            j += 1
            word &= word - _1
        start += 8
    return j


@kernel("void(Array(uint32, 1, 'C', readonly=True), int64, uint8[::1])")
def pack_bits(numbers, width, out):
    """Write numbers (uint32[n], each below 2**width) at `width` bits each. out: uint8[ceil(n * width / 8)]."""
    word, used, at = np.uint64(0), 0, 0
    for i in range(numbers.size):
        word |= np.uint64(numbers[i]) << np.uint64(used)
        used += width
        while used >= 8:
            out[at] = np.uint8(word & np.uint64(255))
            word >>= np.uint64(8)
            used -= 8
            at += 1
    if used:
        out[at] = np.uint8(word)


@kernel("void(Array(uint8, 1, 'C', readonly=True), int64, uint32[::1])")
def unpack_bits(packed, width, out):
    """The inverse of pack_bits for out.size numbers. packed: uint8[ceil(out.size * width / 8)]."""
    word, held, at = np.uint64(0), 0, 0
    mask = (_1 << np.uint64(width)) - _1
    for i in range(out.size):
        while held < width:
            word |= np.uint64(packed[at]) << np.uint64(held)
            held += 8
            at += 1
        out[i] = np.uint32(word & mask)
        word >>= np.uint64(width)
        held -= width
