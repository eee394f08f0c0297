"""One Huffman code for the four bytes of every index, built from the bytes of 0 to d - 1.

The codes are in 4 streams, which are decoded side by side.
"""

import numpy as np

from ._compile import kernel
from ._helpers import WHOLE_BYTES, word_at
from ._huffman import canonical_codes, code_lengths
from ._intrinsics import helper, load64, store64

LIMIT = 12  # bits of a code, so the four of an index fit a word
STREAMS = 4
MOST_BYTES = LIMIT * 4 // 8  # the most bytes that an index can take
_0, _1, _3, _4, _7, _8, _15 = (np.uint64(x) for x in (0, 1, 3, 4, 7, 8, 15))
_MASK = np.uint64((1 << LIMIT) - 1)


@helper
def _codes(d):
    """Return the codes as in canonical_codes, uint32[256]."""
    counts = np.zeros(256, np.int64)
    for place in range(4):
        unit = np.int64(1) << 8 * place  # so many numbers in a row have the same byte here
        whole, rest = d // (unit << 8) * unit, d % (unit << 8)
        for value in range(256):
            counts[value] += whole + min(max(rest - value * unit, 0), unit)
    lengths, codes = np.zeros(256, np.uint8), np.zeros(256, np.uint32)
    code_lengths(counts, LIMIT, lengths)
    canonical_codes(lengths, LIMIT, codes)
    return codes


@helper
def _quarter(k, stream):
    """Return the first index of a stream, and that of the next stream."""
    size = (k + STREAMS - 1) // STREAMS
    return min(k, stream * size), min(k, (stream + 1) * size)


@kernel("void(Array(uint32, 1, 'C', readonly=True), int64, int64[::1])")
def byte_huffman_ends(indices, d, ends):
    """Compute the ends of the streams that byte_huffman_encode would write, in bytes. ends: int64[STREAMS]."""
    codes, at = _codes(d), np.int64(0)
    for stream in range(STREAMS):
        start, stop = _quarter(indices.size, stream)
        bits = np.int64(0)
        for i in range(np.uint64(start), np.uint64(stop)):
            x = indices[i]
            for place in range(4):
                bits += np.int64(codes[(x >> np.uint32(8 * place)) & np.uint32(255)] >> np.uint32(16))
        at += (bits + 7) // 8
        ends[stream] = at


@kernel("void(Array(uint32, 1, 'C', readonly=True), int64, uint8[::1], int64[::1])")
def byte_huffman_encode(indices, d, out, ends):
    """Write uint32[k], below d, the lowest byte of each first.

    out: uint8[MOST_BYTES * k + 16], of which 8 bytes behind the streams are overwritten with anything. ends: int64[STREAMS],
    written: the end of each stream.
    """
    codes, at = _codes(d), 0
    for stream in range(STREAMS):
        start, stop = _quarter(indices.size, stream)
        word, used = _0, _0
        for i in range(np.uint64(start), np.uint64(stop)):
            x = indices[i]
            for place in range(4):
                code = np.uint64(codes[(x >> np.uint32(8 * place)) & np.uint32(255)])
                word |= (code & np.uint64(0xFFFF)) << used
                used += code >> np.uint64(16)
            store64(out, at, word)
            at += np.int64(used >> _3)
            word >>= used & WHOLE_BYTES
            used &= _7
        at += np.int64(used > _0)
        ends[stream] = at


@helper
def _index(word, table):
    """Return (index, bits, least entry) of the four codes at the low end of a word. An entry is 0 where no code begins."""
    a = np.uint64(table[word & _MASK])
    word >>= a & _15
    b = np.uint64(table[word & _MASK])
    word >>= b & _15
    c = np.uint64(table[word & _MASK])
    word >>= c & _15
    d = np.uint64(table[word & _MASK])
    x = a >> _4 | b >> _4 << _8 | c >> _4 << np.uint64(16) | d >> _4 << np.uint64(24)
    return np.uint32(x), (a & _15) + (b & _15) + (c & _15) + (d & _15), min(min(a, b), min(c, d))


@kernel("boolean(Array(uint8, 1, 'C', readonly=True), int64, Array(int64, 1, 'C', readonly=True), uint32[::1])")
def byte_huffman_decode(data, d, ends, out):
    """Decode out.size indices. Returns False unless the streams are exactly these, ascending and below d.

    data: uint8[m]; ends: int64[STREAMS], ascending, the last is m. Any content is safe.
    """
    codes = _codes(d)
    table = np.zeros(1 << LIMIT, np.uint16)  # symbol << 4 | length; 0 where no code begins
    for symbol in range(256):
        length = np.int64(codes[symbol] >> np.uint32(16))
        if length > 0:
            for slot in range(np.int64(codes[symbol] & np.uint32(0xFFFF)), 1 << LIMIT, 1 << length):
                table[slot] = np.uint16(symbol << 4 | length)
    k = out.size
    bits = np.zeros(STREAMS, np.uint64)
    for stream in range(1, STREAMS):
        bits[stream] = _8 * np.uint64(ends[stream - 1])
    b0, b1, b2, b3 = bits[0], bits[1], bits[2], bits[3]
    second, third = np.uint64(_quarter(k, 1)[0]), np.uint64(_quarter(k, 2)[0])
    fourth = np.uint64(_quarter(k, 3)[0])
    last = np.uint64(max(0, 8 * (data.size - 7)))  # the first bit that 8 bytes cannot be loaded at
    i, least = _0, _1
    while i + fourth < np.uint64(k) and b0 < last and b1 < last and b2 < last and b3 < last:
        out[i], count, entry = _index(load64(data, np.int64(b0 >> _3)) >> (b0 & _7), table)
        b0 += count
        least = min(least, entry)
        out[second + i], count, entry = _index(load64(data, np.int64(b1 >> _3)) >> (b1 & _7), table)
        b1 += count
        least = min(least, entry)
        out[third + i], count, entry = _index(load64(data, np.int64(b2 >> _3)) >> (b2 & _7), table)
        b2 += count
        least = min(least, entry)
        out[fourth + i], count, entry = _index(load64(data, np.int64(b3 >> _3)) >> (b3 & _7), table)
        b3 += count
        least = min(least, entry)
        i += _1
    bits[0], bits[1], bits[2], bits[3] = b0, b1, b2, b3
    valid = True
    for stream in range(STREAMS):
        start, stop = _quarter(k, stream)
        bit, end = bits[stream], ends[stream]
        for j in range(start + np.int64(i), stop):
            out[j], count, entry = _index(word_at(data, np.int64(bit >> _3)) >> (bit & _7), table)
            bit += count
            least = min(least, entry)
        valid &= np.int64((bit + _7) >> _3) == end and (bit & _7 == _0 or data[end - 1] >> np.uint8(bit & _7) == 0)
    for j in range(_1, np.uint64(k)):
        valid &= out[j] > out[j - _1]
    return valid and least > _0 and np.int64(out[k - 1]) < d
