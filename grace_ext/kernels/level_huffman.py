"""Canonical Huffman codes of at most 12 bits for levels, in 4 streams that are decoded side by side.

Huffman, A method for the construction of minimum-redundancy codes, 1952. Where a code would be longer than 12 bits, the
counts are halved (rounded up) until none is.
"""

import numpy as np

from ._compile import kernel
from ._helpers import WHOLE_BYTES
from ._huffman import canonical_codes, tree_lengths
from ._intrinsics import helper, load64, store64
from ._tables import TABLE_ROOM, all_equal, count_levels, read_table, write_table

MAX_LENGTH = 12
STREAMS = 4
_3, _4, _7, _15 = (np.uint64(x) for x in (3, 4, 7, 15))


@helper
def huffman_lengths(counts, lengths):
    """Compute the lengths of a complete code for the levels with counts[s] > 0, at least two; 0 for the others."""
    keys, divisor = np.empty(counts.size, np.int64), 0
    while True:
        n = 0
        for s in range(counts.size):
            lengths[s] = 0
            if counts[s] > 0:
                keys[n] = ((counts[s] + (1 << divisor) - 1) >> divisor) << 8 | s
                n += 1
        if tree_lengths(np.sort(keys[:n]), lengths) <= MAX_LENGTH:
            return
        divisor += 1


@helper
def level_codes(lengths):
    """Return uint32[256]: each code, its first bit the least significant one, << 4 | its length."""
    codes = np.zeros(256, np.uint32)
    canonical_codes(lengths, MAX_LENGTH, codes)
    for s in range(lengths.size):
        codes[s] = np.uint32(((codes[s] & np.uint32(0xFFFF)) << np.uint32(4)) | (codes[s] >> np.uint32(16)))
    return codes


@helper
def huffman_encode(levels, codes, out):
    """Write the codes of levels, least significant bit first, filled with 0 to whole bytes; returns the number of bytes.

    codes: from level_codes; out: uint8[k * 12 / 8 + 16].
    """
    word, used, at = np.uint64(0), np.uint64(0), 0
    whole = np.uint64(levels.size) // _4 * _4
    for i in range(np.uint64(0), whole, _4):
        a, b = np.uint64(codes[levels[i]]), np.uint64(codes[levels[i + np.uint64(1)]])
        c, d = np.uint64(codes[levels[i + np.uint64(2)]]), np.uint64(codes[levels[i + _3]])
        length_a, length_c = a & _15, c & _15
        first = (a >> _4) | ((b >> _4) << length_a)
        second = (c >> _4) | ((d >> _4) << length_c)
        length = length_a + (b & _15)
        word |= (first | (second << length)) << used
        used += length + length_c + (d & _15)
        store64(out, at, word)
        at += np.int64(used >> _3)
        word >>= used & WHOLE_BYTES
        used &= _7
    for i in range(whole, np.uint64(levels.size)):
        code = np.uint64(codes[levels[i]])
        word |= (code >> _4) << used
        used += code & _15
        store64(out, at, word)
        at += np.int64(used >> _3)
        word >>= used & WHOLE_BYTES
        used &= _7
    store64(out, at, word)
    return at + np.int64(used > 0)


@helper
def _word(data, end, bit):
    """Return the bits from `bit` on, at least 57 of them; 0 from data[end] on."""
    at = np.int64(bit >> _3)
    if at + 8 <= end:
        return load64(data, at) >> (bit & _7)
    word = np.uint64(0)
    for j in range(end - 1, at - 1, -1):
        word = (word << np.uint64(8)) | np.uint64(data[j])
    return word >> (bit & _7)


@helper
def _loadable(end):
    """Return the first bit from which the next 8 bytes reach past data[end]."""
    return np.uint64(max(0, 8 * (end - 7)))


@helper
def _four(data, bit, table, mask, out, i):
    word = load64(data, np.int64(bit >> _3)) >> (bit & _7)
    for j in range(_4):
        entry = table[word & mask]
        length = np.uint64(entry) & _15
        out[i + j] = np.uint8(entry >> np.uint16(4))
        word >>= length
        bit += length
    return bit


@helper
def huffman_decode(data, ends, lengths, out):
    """Fill out (uint8[k]), a quarter (rounded up) of it from each stream; returns False if the streams do not fit.

    data: uint8[m]; ends: int64[STREAMS], ascending, at most m: where each stream ends; lengths: uint8[n], at most 12. Any
    content is safe.
    """
    codes = level_codes(lengths)
    room, longest = 1 << MAX_LENGTH, 0
    for s in range(lengths.size):
        if lengths[s] > 0:
            room -= 1 << (MAX_LENGTH - np.int64(lengths[s]))
            longest = max(longest, np.int64(lengths[s]))
    if room != 0:  # not a complete code
        return False
    table = np.zeros(1 << longest, np.uint16)
    mask = np.uint64(table.size - 1)
    for s in range(lengths.size):
        if lengths[s] > 0:
            for slot in range(np.int64(codes[s] >> np.uint32(4)), table.size, 1 << np.int64(lengths[s])):
                table[slot] = np.uint16((s << 4) | np.int64(lengths[s]))
    quarter = (out.size + STREAMS - 1) // STREAMS
    bits, places, stops = np.zeros(STREAMS, np.uint64), np.zeros(STREAMS, np.uint64), np.zeros(STREAMS, np.uint64)
    for t in range(STREAMS):
        bits[t] = np.uint64(8 * (ends[t - 1] if t > 0 else 0))
        places[t] = np.uint64(min(t * quarter, out.size))
        stops[t] = np.uint64(min((t + 1) * quarter, out.size))
    b0, b1, b2, b3 = bits[0], bits[1], bits[2], bits[3]
    p0, p1, p2, p3 = places[0], places[1], places[2], places[3]
    e0, e1, e2, e3 = _loadable(ends[0]), _loadable(ends[1]), _loadable(ends[2]), _loadable(ends[3])
    while p3 + _4 <= stops[3] and b0 < e0 and b1 < e1 and b2 < e2 and b3 < e3:
        b0 = _four(data, b0, table, mask, out, p0)
        b1 = _four(data, b1, table, mask, out, p1)
        b2 = _four(data, b2, table, mask, out, p2)
        b3 = _four(data, b3, table, mask, out, p3)
        p0 += _4
        p1 += _4
        p2 += _4
        p3 += _4
    bits[0], bits[1], bits[2], bits[3] = b0, b1, b2, b3
    places[0], places[1], places[2], places[3] = p0, p1, p2, p3
    good = True
    for t in range(STREAMS):
        bit = bits[t]
        for i in range(places[t], stops[t]):
            entry = table[_word(data, ends[t], bit) & mask]
            out[i] = np.uint8(entry >> np.uint16(4))
            bit += np.uint64(entry) & _15
        good &= np.int64((bit + _7) >> _3) == ends[t] and (bit & _7 == 0 or _word(data, ends[t], bit) == 0)
    return good


@kernel("int64(Array(uint8, 1, 'C', readonly=True), int64, int64, uint8[::1], uint8[::1])")
def huffman_pack(levels, alphabet, limit, bits, out):
    """Write the table of code lengths, the lengths of the first streams and the streams of uint8[k]; returns the bytes used.

    Each level is below `alphabet`. Returns 0 if only one level occurs, and -1 if at least `limit` bytes would be used. bits:
    uint8[k * 12 / 8 + 16 * STREAMS], to work in; out: uint8[limit].
    """
    if all_equal(levels):
        return 0
    if alphabet // 8 + 4 * (STREAMS - 1) >= limit:  # a level takes at least one bit of the table
        return -1
    counts = np.empty(alphabet, np.int64)
    count_levels(levels, counts)
    lengths = np.empty(alphabet, np.uint8)
    huffman_lengths(counts, lengths)
    table = np.empty(TABLE_ROOM, np.uint8)
    start = write_table(lengths, lengths, 0, table)
    quarter = (levels.size + STREAMS - 1) // STREAMS
    codes, sizes, end = level_codes(lengths), np.empty(STREAMS, np.int64), 0
    for t in range(STREAMS):
        sizes[t] = huffman_encode(levels[t * quarter : (t + 1) * quarter], codes, bits[end:])
        end += sizes[t]
    size = start + 4 * (STREAMS - 1) + end
    if size >= limit:
        return -1
    out[:start] = table[:start]
    for t in range(STREAMS - 1):
        for byte in range(4):
            out[start + 4 * t + byte] = np.uint8((sizes[t] >> (8 * byte)) & 255)
    out[start + 4 * (STREAMS - 1) : size] = bits[:end]
    return size


@kernel("int64(Array(uint8, 1, 'C', readonly=True), int64, uint8[::1])")
def huffman_unpack(body, alphabet, out):
    """Decode what huffman_pack has written to out, uint8[k]. Any content is safe.

    Returns 0; -1 if the table is damaged, and -2 if the streams are.
    """
    lengths, unused = np.empty(alphabet, np.uint8), np.empty(alphabet, np.uint8)
    start = read_table(body, 0, MAX_LENGTH, lengths, unused)
    if start < 0 or body.size < start + 4 * (STREAMS - 1):
        return -1
    data = body[start + 4 * (STREAMS - 1) :]
    ends, end = np.empty(STREAMS, np.int64), np.int64(0)
    for t in range(STREAMS - 1):
        for byte in range(4):
            end += np.int64(body[start + 4 * t + byte]) << (8 * byte)
        ends[t] = end
    ends[STREAMS - 1] = data.size
    return 0 if end <= data.size and huffman_decode(data, ends, lengths, out) else -2
