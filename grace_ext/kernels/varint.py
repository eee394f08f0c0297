"""LEB128 numbers: 7 bits a byte, least significant first, the top bit set on all but the last byte."""

import numpy as np

from ._compile import kernel
from ._helpers import word_at
from ._intrinsics import bit_length, helper, store64, trailing_zeros

_0, _1, _3, _7, _8 = (np.uint64(x) for x in (0, 1, 3, 7, 8))
_TOPS = np.uint64(0x8080808080808080)
# The five groups of 7 bits in a number, which encoding spreads to whole bytes.
_A, _B, _C, _D, _E = (np.uint64(0x7F << 7 * i) for i in range(5))
_LONGEST = np.uint64(5)


@helper
def _further_bytes(gap):
    more = np.uint32(gap >= np.uint32(1 << 7)) + np.uint32(gap >= np.uint32(1 << 14))
    more += np.uint32(gap >= np.uint32(1 << 21)) + np.uint32(gap >= np.uint32(1 << 28))
    return np.uint32(more)


@kernel("int64(Array(uint32, 1, 'C', readonly=True))")
def varint_bytes(indices):
    """Return how many bytes varint_encode writes for uint32[k], strictly ascending, below 2**31, k >= 1."""
    total = np.int64(_further_bytes(indices[0]))
    for i in range(_1, np.uint64(indices.size)):
        total += np.int64(_further_bytes(np.uint32(indices[i] - indices[i - _1] - np.uint32(1))))
    return total + indices.size


@kernel("void(Array(uint32, 1, 'C', readonly=True), uint8[::1])")
def varint_encode(indices, out):
    """Write the gaps of uint32[k], strictly ascending, below 2**31.

    out: uint8[varint_bytes(indices) + 8], of which the last 8 bytes are overwritten with anything.
    """
    previous, at = _0, 0  # previous: one past the last index
    for i in range(indices.size):
        x = np.uint64(indices[i])
        gap = x - previous
        previous = x + _1
        bytes_ = ((bit_length(gap | _1) + np.uint64(6)) * np.uint64(37)) >> _8  # ceil(bits / 7)
        word = (gap & _A) | (gap & _B) << _1 | (gap & _C) << np.uint64(2) | (gap & _D) << _3 | (gap & _E) << np.uint64(4)
        word |= _TOPS & ((_1 << (_8 * (bytes_ - _1))) - _1)
        store64(out, at, word)
        at += np.int64(bytes_)


@helper
def _first(word):
    """Return (number, bytes, whether it is invalid) of the code at the low end of a word."""
    top = trailing_zeros(~word & _TOPS)  # of the last byte; 64 if there is none
    bytes_ = (top + _1) >> _3
    code = word & ((_1 << (top & np.uint64(63))) - _1)
    gap = (code & _A) | (code >> _1 & _B) | (code >> np.uint64(2) & _C) | (code >> _3 & _D) | (code >> np.uint64(4) & _E)
    longer_than_needed = (bytes_ > _1) & (gap >> (_7 * bytes_ - _7 & np.uint64(63)) == _0)
    return gap, bytes_, (bytes_ > _LONGEST) | (gap >> np.uint64(31) != _0) | longer_than_needed


@kernel("boolean(Array(uint8, 1, 'C', readonly=True), int64, uint32[::1])")
def varint_decode(codes, d, out):
    """Decode out.size indices below d. Returns False unless codes (uint8[m]) is exactly so many gaps.

    Each gap has to be in its shortest form and below 2**31.
    """
    k, position = np.uint64(out.size), _0  # position: one past the last index
    i, at, refused = _0, 0, False
    while i < k:
        word = word_at(codes, at)
        gap, bytes_, wrong = _first(word)
        refused |= wrong
        position += gap + _1
        out[i] = np.uint32(position - _1)
        i += _1
        gap, further, wrong = _first(word >> (_8 * bytes_ & np.uint64(63)))
        # A word that holds a second whole code saves one load.
        if i < k and bytes_ + further <= _8:
            refused |= wrong
            position += gap + _1
            out[i] = np.uint32(position - _1)
            i += _1
            bytes_ += further
        at += np.int64(bytes_)
    return at == codes.size and not refused and position <= np.uint64(d)
