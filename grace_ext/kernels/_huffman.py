"""Canonical Huffman codes of limited length, for the kernels that use them."""

import numpy as np

from ._intrinsics import helper


@helper
def tree_lengths(keys, lengths):
    """lengths[s] = bits of symbol s in Huffman's code, of any length; returns the largest.

    keys: int64[n], weight << 8 | symbol, ascending, n >= 2. Inner nodes come in ascending order, so two queues suffice; of
    equal weights, a symbol comes before an inner node.
    """
    n = keys.size
    weight, parent, depth = np.empty(2 * n, np.int64), np.empty(2 * n, np.int64), np.empty(2 * n, np.int64)
    for leaf in range(n):
        weight[leaf] = keys[leaf] >> 8
    leaf, node = 0, n
    for new in range(n, 2 * n - 1):
        weight[new] = 0
        for _ in range(2):
            if leaf < n and (node == new or weight[leaf] <= weight[node]):
                child = leaf
                leaf += 1
            else:
                child = node
                node += 1
            parent[child] = new
            weight[new] += weight[child]
    depth[2 * n - 2] = 0
    longest = 0
    for child in range(2 * n - 3, -1, -1):
        depth[child] = depth[parent[child]] + 1
        longest = max(longest, depth[child])
    for leaf in range(n):
        lengths[keys[leaf] & 255] = depth[leaf]
    return longest


@helper
def code_lengths(counts, limit, lengths):
    """lengths[s] = bits of symbol s in an optimal code of at most `limit` bits; 0 where counts[s] is 0.

    A single symbol gets 1 bit. counts: integers below 2**54; at most 256 and at most 2**limit of them above 0. Huffman's code
    or, where that is too long, the package-merge algorithm (Larmore and Hirschberg, A fast algorithm for optimal
    length-limited Huffman codes, 1990), which gives the same lengths where both apply; ties go to the lower symbol.
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
    if tree_lengths(keys, lengths) <= limit:
        return
    for leaf in range(n):
        lengths[keys[leaf] & 255] = 0
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
    counts, following = np.zeros(limit + 1, np.int64), np.zeros(limit + 1, np.int64)
    for s in range(lengths.size):
        counts[lengths[s]] += 1
    for length in range(1, limit):
        following[length + 1] = (following[length] + counts[length]) << 1
    for s in range(lengths.size):
        length, turned = np.int64(lengths[s]), 0
        code = following[length]
        following[length] += 1
        for bit in range(length):
            turned |= ((code >> bit) & 1) << (length - 1 - bit)
        codes[s] = np.uint32(length << 16 | turned)


@helper
def is_code(lengths, limit):
    """Return whether the lengths, each <= `limit`, are those of a complete code, of a single symbol (1 bit), or all 0."""
    room, used = np.int64(0), 0
    for s in range(lengths.size):
        if lengths[s] > 0:
            room += np.int64(1) << (limit - np.int64(lengths[s]))
            used += 1
    return used == 0 or room == np.int64(1) << limit or (used == 1 and room == np.int64(1) << (limit - 1))
