"""Levels (small unsigned integers) packed at a fixed width."""

import numpy as np

from ._compile import kernel
from ._helpers import spread, squeeze
from ._intrinsics import load64, store64


@kernel("void(Array(uint8, 1, 'C', readonly=True), int64, uint8[::1])")
def pack_levels_fixed(levels, width, out):
    """Write levels (each below 2**width) at `width` bits, 1 to 8, least significant first. out: uint8[k * width / 8 + 8]."""
    last = np.zeros(8, np.uint8)
    W = np.uint64(width)
    at = 0
    whole = levels.size & ~7
    for i in range(0, whole, 8):
        store64(out, at, squeeze(load64(levels, i), W))
        at += width
    if whole < levels.size:
        for i in range(levels.size - whole):
            last[i] = levels[whole + i]
        store64(out, at, squeeze(load64(last, 0), W))


@kernel("int64(Array(uint8, 1, 'C', readonly=True), int64, uint8[::1])")
def unpack_levels_fixed(packed, width, out):
    """The inverse of pack_levels_fixed. packed: uint8[ceil(k * width / 8)]. Returns the largest level."""
    W = np.uint64(width)
    last = np.zeros(8, np.uint8)
    at = 0
    for i in range(0, out.size, 8):
        if at + 8 <= packed.size:  # word_at in full: with a call of it, this loop takes 1.9 times as long
            word = load64(packed, at)
        else:
            word = np.uint64(0)
            for j in range(packed.size - 1, at - 1, -1):
                word = (word << np.uint64(8)) | np.uint64(packed[j])
        if i + 8 <= out.size:
            store64(out, i, spread(word, W))
        else:
            store64(last, 0, spread(word, W))
            for j in range(out.size - i):
                out[i + j] = last[j]
        at += width
    largest = np.uint8(0)
    for level in out:
        largest = max(largest, level)
    return np.int64(largest)
