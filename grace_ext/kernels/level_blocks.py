"""Blocks of levels sorted into classes of similar width, so that each class has frequencies of its own.

The width of a block is the sum of its levels' distances from the middle. There are four fine classes for each octave of the
width; neighbouring ones are merged while that saves bits or while there are too many.
"""

import numpy as np

from ._compile import kernel
from ._helpers import n_log2
from ._intrinsics import bits_of, helper, load64, store64

BLOCK = 64
MOST_CLASSES = 8
_FINE = 58  # the fine classes: one for a width of 0, then four for each octave, up to 64 * 255
_STREAM, _LEVEL, _ABSENT = 320.0, 4.0, 1.0  # bits, about, of a stream's states and of a level in its table, used or unused


@helper
def _fine_class(block, middle):
    width = np.int32(0)
    for level in block:
        width += abs(np.int32(level) - middle)
    if width == 0:
        return 0
    return 1 + np.int64(bits_of(np.float32(width)) >> np.uint32(21)) - (127 << 2)


@helper
def _cost(counts, a, b, blocks):
    """Return the bits of the levels in rows a and b (counted once if they are equal) and of the numbers of their blocks."""
    total, bits = 0, _STREAM - n_log2(blocks)
    for s in range(counts.shape[1]):
        n = counts[a, s] + (counts[b, s] if a != b else 0)
        total += n
        bits += _LEVEL - n_log2(n) if n else _ABSENT
    return bits + n_log2(total)


@kernel("float64(Array(uint8, 1, 'C', readonly=True), int64, uint8[::1], int64[::1])")
def choose_classes(levels, alphabet, numbers, sizes):
    """Choose the class of each block of 64 levels; returns about how many bits separate codes save.

    levels: uint8[k], k >= 1, each below alphabet; numbers: uint8[ceil(k / 64)], written: the classes from 0 on, none empty;
    sizes: int64[MOST_CLASSES], written: levels in each class, 0 beyond the last.
    """
    tables = np.zeros((2 * _FINE, alphabet), np.uint32)  # two for each class, so that equal neighbours need not wait
    blocks = np.zeros(_FINE, np.int64)
    middle = np.int32((alphabet - 1) >> 1)
    for b in range(numbers.size):
        block = levels[b * BLOCK : (b + 1) * BLOCK]
        fine = _fine_class(block, middle)
        numbers[b] = fine
        blocks[fine] += 1
        one, other = tables[2 * fine], tables[2 * fine + 1]
        for i in range(0, block.size - 1, 2):
            one[block[i]] += np.uint32(1)
            other[block[i + 1]] += np.uint32(1)
        if block.size & 1:
            one[block[block.size - 1]] += np.uint32(1)

    n = 0
    counts = np.zeros((_FINE + 1, alphabet), np.int64)  # of those that occur; the last row: of all
    rows, tops = np.empty(_FINE, np.int64), np.empty(_FINE, np.int64)  # of each class: its row, its largest fine class
    for fine in range(_FINE):
        if blocks[fine] == 0:
            continue
        for s in range(alphabet):
            counts[n, s] = np.int64(tables[2 * fine, s]) + np.int64(tables[2 * fine + 1, s])
            counts[_FINE, s] += counts[n, s]
        rows[n], tops[n], blocks[n] = n, fine, blocks[fine]
        n += 1
    own, both = np.empty(_FINE), np.empty(_FINE)  # bits of each class; together with the next one
    for c in range(n):
        own[c] = _cost(counts, rows[c], rows[c], blocks[c])
    for c in range(n - 1):
        both[c] = _cost(counts, rows[c], rows[c + 1], blocks[c] + blocks[c + 1])
    while n > 1:
        best, least = 0, np.inf
        for c in range(n - 1):
            more = both[c] - own[c] - own[c + 1]
            if more < least:
                best, least = c, more
        if least > 0 and n <= MOST_CLASSES:
            break
        counts[rows[best]] += counts[rows[best + 1]]
        blocks[best] += blocks[best + 1]
        own[best], tops[best] = both[best], tops[best + 1]
        n -= 1
        for c in range(best + 1, n):
            rows[c], tops[c], blocks[c], own[c], both[c] = rows[c + 1], tops[c + 1], blocks[c + 1], own[c + 1], both[c + 1]
        for c in range(max(0, best - 1), min(best + 1, n - 1)):
            both[c] = _cost(counts, rows[c], rows[c + 1], blocks[c] + blocks[c + 1])

    lookup, c = np.zeros(_FINE, np.uint8), 0
    for fine in range(tops[n - 1] + 1):
        lookup[fine] = c
        c += fine == tops[c]
    for b in range(numbers.size):
        numbers[b] = lookup[numbers[b]]
    sizes[:] = 0
    saved = _cost(counts, _FINE, _FINE, 1) - _STREAM - n_log2(numbers.size)
    for c in range(n):
        saved -= own[c]
        for s in range(alphabet):
            sizes[c] += counts[rows[c], s]
    return saved


@kernel("boolean(Array(uint8, 1, 'C', readonly=True), int64, int64[::1])")
def class_sizes(numbers, k, sizes):
    """sizes[c] = how many of k levels class c has. Returns False if one has none.

    numbers: uint8[ceil(k / 64)], k >= 1, each below sizes.size.
    """
    sizes[:] = 0
    for c in numbers:
        sizes[c] += BLOCK
    sizes[numbers[numbers.size - 1]] -= numbers.size * BLOCK - k
    good = True
    for size in sizes:
        good &= size > 0
    return good


@helper
def _starts(sizes):
    starts, total = np.empty(sizes.size, np.int64), 0
    for c in range(sizes.size):
        starts[c] = total
        total += sizes[c]
    return starts


@kernel(
    "void(Array(uint8, 1, 'C', readonly=True), Array(uint8, 1, 'C', readonly=True),"
    " Array(int64, 1, 'C', readonly=True), uint8[::1])"
)
def split_blocks(levels, numbers, sizes, out):
    """out (uint8[k]) = the blocks of class 0, then those of class 1, and so on. numbers and sizes: as above."""
    at = _starts(sizes)
    for b in range(numbers.size):
        c, first = numbers[b], b * BLOCK
        start = at[c]
        if first + BLOCK <= levels.size:
            for i in range(0, BLOCK, 8):
                store64(out, start + i, load64(levels, first + i))
        else:
            for i in range(levels.size - first):
                out[start + i] = levels[first + i]
        at[c] = start + BLOCK


@kernel(
    "void(Array(uint8, 1, 'C', readonly=True), Array(uint8, 1, 'C', readonly=True),"
    " Array(int64, 1, 'C', readonly=True), uint8[::1])"
)
def merge_blocks(parts, numbers, sizes, out):
    """The inverse of split_blocks: parts and out are uint8[k]."""
    at = _starts(sizes)
    for b in range(numbers.size):
        c, first = numbers[b], b * BLOCK
        start = at[c]
        if first + BLOCK <= out.size:
            for i in range(0, BLOCK, 8):
                store64(out, first + i, load64(parts, start + i))
        else:
            for i in range(out.size - first):
                out[first + i] = parts[start + i]
        at[c] = start + BLOCK
