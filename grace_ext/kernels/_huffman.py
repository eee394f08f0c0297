"""Canonical Huffman codes of limited length, for the kernels that use them."""

import numpy as np

from ._intrinsics import helper


@helper
def code_lengths(counts, limit, lengths):
    """lengths[s] = bits of symbol s in an optimal code of at most `limit` bits; 0 where counts[s] is 0.

    A single symbol gets 1 bit. counts: integers below 2**55; at most 256 and at most 2**limit of them above 0. The
    package-merge algorithm (Larmore and Hirschberg, A fast algorithm for optimal length-limited Huffman codes, 1990); ties
    go to the lower symbol.
    """
    keys, n = np.empty(counts.size, np.int64), 0
    for s in range(counts.size):
        lengths[s] = 0
        if counts[s] > 0:
            keys[n] = np.int64(counts[s]) << 8 | s
            n += 1
    if n == 0:
        return
    keys = np.sort(keys[:n])
    if n == 1:
        lengths[keys[0] & 255] = 1
        return
    # Each level lists the symbols and the pairs of the level below, lightest first.
    is_symbol = np.zeros((limit, 2 * n), np.uint8)
    below, here = np.empty(2 * n, np.int64), np.empty(2 * n, np.int64)
    size = 0
    for level in range(limit):
        pairs, leaf, pair, at = size // 2, 0, 0, 0
        while leaf < n or pair < pairs:
            packed = below[2 * pair] + below[2 * pair + 1] if pair < pairs else np.int64(0)
            if pair == pairs or (leaf < n and keys[leaf] >> 8 <= packed):
                here[at] = keys[leaf] >> 8
                is_symbol[level, at] = 1
                leaf += 1
            else:
                here[at] = packed
                pair += 1
            at += 1
        below, here = here, below
        size = at
    # Of the topmost level the lightest 2n - 2 entries are bought; each entry of a symbol makes its code a bit longer.
    wanted = 2 * n - 2
    for level in range(limit - 1, -1, -1):
        symbols = 0
        for at in range(wanted):
            symbols += np.int64(is_symbol[level, at])
        for leaf in range(symbols):
            lengths[keys[leaf] & 255] += 1
        wanted = 2 * (wanted - symbols)


@helper
def canonical_codes(lengths, limit, codes):
    """codes[s] = the code of symbol s, its first bit the least significant one, with its length << 16.

    The entry is 0 where the length is 0. Shorter codes come first, and equal lengths are in the order of the symbols.
    """
    code = 0
    for s in range(lengths.size):
        codes[s] = np.uint32(0)
    for length in range(1, limit + 1):
        for s in range(lengths.size):
            if lengths[s] == length:
                turned = 0
                for bit in range(length):
                    turned |= ((code >> bit) & 1) << (length - 1 - bit)
                codes[s] = np.uint32(length << 16 | turned)
                code += 1
        code <<= 1


@helper
def is_code(lengths, limit):
    """Return whether the lengths, each <= `limit`, are those of a complete code, of a single symbol (1 bit), or all 0."""
    room, used = np.int64(0), 0
    for s in range(lengths.size):
        if lengths[s] > 0:
            room += np.int64(1) << (limit - np.int64(lengths[s]))
            used += 1
    return used == 0 or room == np.int64(1) << limit or (used == 1 and room == np.int64(1) << (limit - 1))
