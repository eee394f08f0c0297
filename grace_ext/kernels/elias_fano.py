"""Elias-Fano codes: the lower e bits of each position packed, the upper ones in unary, with random access.

Bit (x >> e) + i of the second stream is set for the i-th position x.
"""

import numpy as np

from ._compile import kernel
from ._helpers import WHOLE_BYTES, word_at
from ._intrinsics import load64, popcount, store64, trailing_zeros

_0, _1, _3, _7 = (np.uint64(x) for x in (0, 1, 3, 7))


@kernel("void(Array(uint32, 1, 'C', readonly=True), int64, uint8[::1], uint8[::1])")
def elias_fano_encode(indices, e, lows, highs):
    """Write uint32[k], strictly ascending.

    lows: uint8[ceil(k * e / 8) + 8], of which the last 8 bytes are overwritten with anything; highs: zeroed,
    uint8[ceil(((last >> e) + k) / 8)]; 0 <= e <= 31.
    """
    E = np.uint64(e)
    mask = (_1 << E) - _1
    low, used, at = _0, _0, 0
    for i in range(np.uint64(indices.size)):
        x = np.uint64(indices[i])
        low |= (x & mask) << used
        used += E
        store64(lows, at, low)
        at += np.int64(used >> _3)
        low >>= used & WHOLE_BYTES
        used &= _7
        bit = (x >> E) + i
        highs[bit >> _3] |= np.uint8(_1 << (bit & _7))


@kernel("int64(Array(uint8, 1, 'C', readonly=True), Array(uint8, 1, 'C', readonly=True), int64, int64, uint32[::1])")
def elias_fano_decode(lows, highs, d, e, out):
    """Decode out.size positions; returns the bits used of highs.

    Returns -1 unless highs holds exactly so many ones and they are ascending positions below d. lows: uint8[ceil(k * e /
    8)]; highs: any uint8[m], m < 2**31; 0 <= e <= 31. Any content is safe.
    """
    k, E = np.uint64(out.size), np.uint64(e)
    mask = (_1 << E) - _1
    loadable = np.uint64((8 * lows.size - 64) // e) if e > 0 and lows.size >= 8 else _0
    j, bit, next_free, end = _0, _0, _0, _0
    unordered = False
    for at in range(0, highs.size, 8):
        word = word_at(highs, at)
        base = np.uint64(8 * at)
        stop = j + popcount(word)
        if stop > k:
            return -1
        fast = stop <= loadable
        while j < stop:
            end = base + trailing_zeros(word)
            word &= word - _1
            if fast:
                low = load64(lows, np.int64(bit >> _3))
            else:
                low = word_at(lows, np.int64(bit >> _3))
            x = ((end - j) << E) | ((low >> (bit & _7)) & mask)
            unordered |= x < next_free
            next_free = x + _1
            out[j] = np.uint32(x)
            j += _1
            bit += E
    if j < k or unordered or next_free > np.uint64(d):
        return -1
    return np.int64(end + _1)


@kernel("int64(Array(uint8, 1, 'C', readonly=True), Array(uint8, 1, 'C', readonly=True), int64, int64)")
def elias_fano_select(lows, highs, e, i):
    """Return the i-th position (from 0), by counting 64 bits of highs at a time, or -1 if it holds fewer.

    lows: as in decode, of more than i positions.
    """
    E = np.uint64(e)
    left = np.uint64(i)
    for at in range(0, highs.size, 8):
        word = word_at(highs, at)
        count = popcount(word)
        if left >= count:
            left -= count
            continue
        for _ in range(left):
            word &= word - _1
        high = np.uint64(8 * at) + trailing_zeros(word) - np.uint64(i)
        bit = np.uint64(i) * E
        low = (word_at(lows, np.int64(bit >> _3)) >> (bit & _7)) & ((_1 << E) - _1)
        return np.int64((high << E) | low)
    return -1
