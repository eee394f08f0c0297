"""Rice codes of the gaps with a parameter e for each block of them, in two streams as in rice.py."""

import numpy as np

from ._compile import kernel
from ._helpers import MAX_SHIFT, WHOLE_BYTES, word_at
from ._intrinsics import bit_length, helper, load64, popcount, store64, trailing_zeros

_0, _1, _3, _7 = (np.uint64(x) for x in (0, 1, 3, 7))


@helper
def _quotients(indices, start, end, e):
    """Return the sum of gap >> e for the gaps before indices[start:end]. All gaps together are below 2**31."""
    E = np.uint32(e)
    total = np.uint32(0)
    if start == _0:
        total = np.uint32(indices[0] >> E)
        start = _1
    for i in range(start, end):
        total = np.uint32(total + np.uint32(np.uint32(indices[i] - indices[i - _1] - np.uint32(1)) >> E))
    return np.int64(total)


@kernel("UniTuple(int64, 2)(Array(uint32, 1, 'C', readonly=True), int64, uint32[::1])")
def block_shifts(indices, block, shifts):
    """Choose an e for each block; returns the bits of the remainders and of the quotients.

    indices: uint32[k], strictly ascending, below 2**31, k >= 1; shifts: uint32[ceil(k / block)]. Each e is the local minimum
    that a descent from the e of the block's mean reaches.
    """
    k = indices.size
    remainder_bits, quotient_bits = np.int64(0), np.int64(k)
    for number in range(shifts.size):
        start, end = number * block, min(k, (number + 1) * block)
        count = end - start
        before = np.int64(indices[start - 1]) if start > 0 else np.int64(-1)
        mean = (np.int64(indices[end - 1]) - before - count) // count
        first, last = np.uint64(start), np.uint64(end)
        e = min(MAX_SHIFT, max(0, np.int64(bit_length(np.uint64(mean))) - 1))
        quotients = _quotients(indices, first, last, e)
        for step in (-1, 1):
            while 0 <= e + step <= MAX_SHIFT:
                further = _quotients(indices, first, last, e + step)
                if further + count * step >= quotients:
                    break
                e += step
                quotients = further
        shifts[number] = np.uint32(e)
        remainder_bits += count * e
        quotient_bits += quotients
    return remainder_bits, quotient_bits


@kernel("void(Array(uint32, 1, 'C', readonly=True), int64, Array(uint32, 1, 'C', readonly=True), uint8[::1], uint8[::1])")
def rice_blocks_encode(indices, block, shifts, remainders, quotients):
    """Write the gaps. shifts: from block_shifts.

    remainders, quotients: uint8, 8 bytes longer than what is written to them; these are overwritten with anything.
    """
    low, low_used, low_at = _0, _0, 0
    high, high_used, high_at = _0, _0, 0
    previous = _0  # one past the last index
    for number in range(shifts.size):
        E = np.uint64(shifts[number])
        mask = (_1 << E) - _1
        for i in range(number * block, min(indices.size, (number + 1) * block)):
            index = np.uint64(indices[i])
            gap = index - previous
            previous = index + _1
            low |= (gap & mask) << low_used
            low_used += E
            store64(remainders, low_at, low)
            low_at += np.int64(low_used >> _3)
            low >>= low_used & WHOLE_BYTES
            low_used &= _7
            quotient = gap >> E
            while high_used + quotient > WHOLE_BYTES:
                store64(quotients, high_at, high)
                high_at += 7
                quotient -= WHOLE_BYTES - high_used
                high, high_used = _0, _0
            high_used += quotient
            high |= _1 << high_used
            high_used += _1
            store64(quotients, high_at, high)
            high_at += np.int64(high_used >> _3)
            high >>= high_used & WHOLE_BYTES
            high_used &= _7


@kernel(
    "int64(Array(uint8, 1, 'C', readonly=True), Array(uint8, 1, 'C', readonly=True), int64, "
    "Array(uint32, 1, 'C', readonly=True), int64, uint32[::1])"
)
def rice_blocks_decode(remainders, quotients, block, shifts, d, out):
    """Decode out.size indices below d; returns the bits read of the quotients.

    Returns -1 if they hold too few codes, ones behind the last code, or an index >= d. shifts: uint32[ceil(k / block)], at
    most MAX_SHIFT; any other content is safe.
    """
    k, size, D = np.uint64(out.size), np.uint64(block), np.uint64(d)
    word, at = word_at(quotients, 0), np.int64(0)
    j, bit, end = _0, _0, _0  # end: one past the last one that was read
    position = _0  # one past the last index of the block before
    for number in range(np.uint64(shifts.size)):
        E = np.uint64(shifts[number])
        mask = (_1 << E) - _1
        block_end = min(k, (number + _1) * size)
        # In the block, an index is the sum of the codes before it, j ones and the quotients' zeros, and of the remainders.
        first, start, low_sum = j, end, _0
        while j < block_end:
            while word == _0:
                at += 8
                if at >= quotients.size:
                    return -1
                word = word_at(quotients, at)
            base = np.uint64(8 * at)
            stop = min(block_end, j + popcount(word))
            loadable = np.int64((bit + (stop - j) * E) >> _3) + 8 <= remainders.size
            while j < stop:
                end = base + trailing_zeros(word) + _1
                word &= word - _1
                if E == _0:
                    low = _0
                elif loadable:
                    low = load64(remainders, np.int64(bit >> _3))
                else:
                    low = word_at(remainders, np.int64(bit >> _3))
                low_sum += (low >> (bit & _7)) & mask
                bit += E
                codes = j - first
                out[j] = np.uint32(position + ((end - start - codes - _1) << E) + low_sum + codes)
                j += _1
        zeros = end - start - (j - first)
        if zeros > D:
            return -1
        position += (zeros << E) + low_sum + (j - first)
        if position > D:
            return -1
    if word != _0 or at + 8 < quotients.size:
        return -1
    return np.int64(end)
