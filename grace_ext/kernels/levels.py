"""Levels (small unsigned integers): counting, packing at a fixed width, and the tables of their entropy codes."""

import numpy as np

from ._compile import kernel
from ._helpers import spread, squeeze
from ._intrinsics import helper, load64, store64

#: Bytes that write_table may write for an alphabet of 256: up to 27 bits of class and 3 of mantissa for each, and a word.
TABLE_ROOM = 256 * 30 // 8 + 8


@kernel("int64(Array(uint8, 1, 'C', readonly=True), int64[::1])")
def count_levels(levels, counts):
    """counts[s] = how often s occurs in levels (uint8[k], each below counts.size). Returns the largest count."""
    # Four tables, so that a run of equal levels need not wait for its own counter.
    tables = np.zeros((4, 256), np.uint32)
    whole = np.uint64(levels.size & ~3)
    for i in range(np.uint64(0), whole, np.uint64(4)):
        tables[0, levels[i]] += np.uint32(1)
        tables[1, levels[i + np.uint64(1)]] += np.uint32(1)
        tables[2, levels[i + np.uint64(2)]] += np.uint32(1)
        tables[3, levels[i + np.uint64(3)]] += np.uint32(1)
    for i in range(whole, np.uint64(levels.size)):
        tables[0, levels[i]] += np.uint32(1)
    largest = 0
    for s in range(counts.size):
        counts[s] = np.int64(tables[0, s]) + np.int64(tables[1, s]) + np.int64(tables[2, s]) + np.int64(tables[3, s])
        largest = max(largest, counts[s])
    return largest


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


@helper
def _put_bit(out, at, bit):
    if at & 7 == 0:
        out[at >> 3] = np.uint8(0)
    out[at >> 3] |= np.uint8(bit << (at & 7))
    return at + 1


@kernel("int64(Array(uint8, 1, 'C', readonly=True), Array(uint8, 1, 'C', readonly=True), int64, uint8[::1])")
def write_table(classes, mantissas, width, out):
    """Write a class and a mantissa for each level; returns the bytes used of out, uint8[TABLE_ROOM].

    A class is coded as its difference from the one before (0 before the first): 0, -1, 1, -2, 2, ... as so many ones and a
    zero. A class c >= 1 is followed by its mantissa in min(c - 1, width) bits.
    """
    at, previous = 0, 0
    for s in range(classes.size):
        step = np.int64(classes[s]) - previous
        previous += step
        for _ in range(2 * step if step >= 0 else -2 * step - 1):
            at = _put_bit(out, at, 1)
        at = _put_bit(out, at, 0)
        for j in range(min(previous - 1, width)):
            at = _put_bit(out, at, (np.int64(mantissas[s]) >> j) & 1)
    return (at + 7) >> 3


@kernel("int64(Array(uint8, 1, 'C', readonly=True), int64, int64, uint8[::1], uint8[::1])")
def read_table(data, width, largest, classes, mantissas):
    """The inverse of write_table; returns the bytes used.

    Returns -1 if data ends, a class is out of 0..largest, or a spare bit is set.
    """
    at, previous, end = 0, 0, 8 * data.size
    for s in range(classes.size):
        count = 0
        while at < end and (data[at >> 3] >> np.uint8(at & 7)) & np.uint8(1):
            at += 1
            count += 1
        at += 1  # the zero
        previous += count >> 1 if count & 1 == 0 else -((count + 1) >> 1)
        if not 0 <= previous <= largest:
            return -1
        classes[s] = np.uint8(previous)
        mantissa = 0
        for j in range(min(previous - 1, width)):
            if at < end:
                mantissa |= np.int64((data[at >> 3] >> np.uint8(at & 7)) & np.uint8(1)) << j
            at += 1
        mantissas[s] = np.uint8(mantissa)
        if at > end:
            return -1
    if at & 7 and data[at >> 3] >> np.uint8(at & 7):
        return -1
    return (at + 7) >> 3
