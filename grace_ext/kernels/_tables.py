"""What the entropy codes of levels have in common: counting the levels, and the tables that precede the codes."""

import numpy as np

from ._helpers import WHOLE_BYTES
from ._intrinsics import helper, store64

#: Bytes that write_table may write for an alphabet of 256: up to 27 bits of class and 3 of mantissa for each, and a word.
TABLE_ROOM = 256 * 30 // 8 + 8
_FEW = 1024
_1, _3, _7 = (np.uint64(x) for x in (1, 3, 7))


@helper
def count_levels(levels, counts):
    """counts[s] = how often s occurs in levels (uint8[k], each below counts.size)."""
    if levels.size <= _FEW:
        counts[:] = 0
        for level in levels:
            counts[level] += 1
        return
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
    for s in range(counts.size):
        counts[s] = np.int64(tables[0, s]) + np.int64(tables[1, s]) + np.int64(tables[2, s]) + np.int64(tables[3, s])


@helper
def all_equal(levels):
    """Return whether all levels (uint8[k], k >= 1) are the same."""
    first = levels[0]
    for level in levels:
        if level != first:
            return False
    return True


@helper
def write_table(classes, mantissas, width, out):
    """Write a class and a mantissa for each level; returns the bytes used of out, uint8[TABLE_ROOM].

    A class is coded as its difference from the one before (0 before the first): 0, -1, 1, -2, 2, ... as so many ones and a
    zero. A class c >= 1 is followed by its mantissa in min(c - 1, width) bits, at most 3.
    """
    at, word, used, previous = 0, np.uint64(0), np.uint64(0), 0
    for s in range(classes.size):
        step = np.int64(classes[s]) - previous
        previous += step
        ones = np.uint64(2 * step if step >= 0 else -2 * step - 1)
        bits = np.uint64(max(0, min(previous - 1, width)))
        word |= ((_1 << ones) - _1 | (np.uint64(mantissas[s]) & ((_1 << bits) - _1)) << (ones + _1)) << used
        used += ones + _1 + bits
        store64(out, at, word)
        at += np.int64(used >> _3)
        word >>= used & WHOLE_BYTES
        used &= _7
    return at + np.int64(used > 0)


@helper
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
