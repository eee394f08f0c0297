"""Run lengths of a bitmap, and numbers as a prefix in unary (zeros, then a one) and a suffix of bits, in two streams.

A code is e (0 to 30), plus GOLOMB for exp-Golomb. In Rice's code, the number v has the prefix v >> e, and its lower e bits
as suffix. In the exp-Golomb code, it has the prefix n, the bit length of (v >> e) + 1 less one, and v - (2**n - 1) * 2**e at
n + e bits as suffix. As in rice.py, the prefixes tell where each suffix is without waiting for the one before it.
"""

import numpy as np

from ._compile import kernel
from ._helpers import MAX_SHIFT, WHOLE_BYTES, word_at
from ._intrinsics import bit_length, bit_length32, helper, load64, popcount, store64, trailing_zeros

_0, _1, _3, _7 = (np.uint64(x) for x in (0, 1, 3, 7))
GOLOMB = 128
_SAMPLE = 4096


@kernel("int64(Array(uint32, 1, 'C', readonly=True), uint32[::1], uint32[::1])")
def runs_of(indices, zeros, ones):
    """Write the runs of the bitmap up to its last one; returns how many pairs of a run of zeros and a run of ones there are.

    indices: uint32[k], strictly ascending, k >= 1. zeros, ones: uint32[k]; they get the lengths, less 1 where a run cannot
    be empty: only the first run of zeros can.
    """
    pairs, previous = _0, np.uint64(indices[0])
    zeros[0] = indices[0]
    ones[0] = np.uint32(0)
    for i in range(_1, np.uint64(indices.size)):
        x = np.uint64(indices[i])
        gap = x - previous - _1
        previous = x
        # Each index is written as the start of the next run, which begins only if zeros came before it.
        zeros[pairs + _1] = np.uint32(gap - _1)
        ones[pairs + _1] = np.uint32(i)
        pairs += np.uint64(gap != _0)
    pairs += _1
    for i in range(_1, pairs):
        ones[i - _1] = np.uint32(ones[i] - ones[i - _1] - np.uint32(1))
    ones[pairs - _1] = np.uint32(np.uint32(indices.size - 1) - ones[pairs - _1])
    return np.int64(pairs)


@helper
def _rice_prefixes(numbers, e):
    total, E = np.int64(0), np.uint32(e)
    for v in numbers:
        total += np.int64(np.uint32(v >> E))
    return total


@helper
def _golomb_prefixes(numbers, e):
    total, E = np.int64(0), np.uint32(e)
    for v in numbers:
        total += np.int64(np.uint32(bit_length32(np.uint32(np.uint32(v >> E) + np.uint32(1))) - np.uint32(1)))
    return total


@helper
def _prefixes(numbers, code):
    if code >= GOLOMB:
        return _golomb_prefixes(numbers, code - GOLOMB)
    return _rice_prefixes(numbers, code)


@helper
def _bits(numbers, code, prefixes):
    """Return the number of all bits, prefixes and suffixes."""
    if code >= GOLOMB:
        return numbers.size * (code - GOLOMB + 1) + 2 * prefixes
    return numbers.size * (code + 1) + prefixes


@helper
def _downhill(numbers, code, kind):
    """Return the code at the end of a descent from this one, among those of its kind (0 or GOLOMB)."""
    bits = _bits(numbers, code, _prefixes(numbers, code))
    for step in (-1, 1):
        while kind <= code + step <= kind + MAX_SHIFT:
            further = _bits(numbers, code + step, _prefixes(numbers, code + step))
            if further >= bits:
                break
            code += step
            bits = further
    return code


@kernel("UniTuple(int64, 3)(Array(uint32, 1, 'C', readonly=True), uint32[::1])")
def best_run_code(numbers, sample):
    """Return (code, bits of the prefixes, bits of the suffixes) of a code for uint32[n] with few bits, n >= 1.

    The e of each kind is searched on a regular sample of the numbers, which is copied to `sample` (uint32[min(n, 4096)]).
    Then the two kinds are compared on all numbers, because a rare large one can make Rice's code very long.
    """
    total, stride = np.int64(0), (numbers.size + _SAMPLE - 1) // _SAMPLE
    count = (numbers.size + stride - 1) // stride
    for i in range(count):
        sample[i] = numbers[i * stride]
        total += np.int64(sample[i])
    start = min(MAX_SHIFT, np.int64(bit_length(np.uint64(total // count))))
    rice = _downhill(sample[:count], start, 0)
    rice_prefixes = _rice_prefixes(numbers, rice)
    if rice == 0 and rice_prefixes == 0:
        return 0, numbers.size, 0
    golomb = _downhill(sample[:count], GOLOMB + start, GOLOMB)
    golomb_prefixes = _prefixes(numbers, golomb)
    code, prefixes = rice, rice_prefixes
    if _bits(numbers, golomb, golomb_prefixes) < _bits(numbers, rice, rice_prefixes):
        code, prefixes = golomb, golomb_prefixes
    return code, prefixes + numbers.size, _bits(numbers, code, prefixes) - prefixes - numbers.size


@kernel("UniTuple(int64, 2)(Array(uint32, 1, 'C', readonly=True), int64, int64, int64, uint8[::1], uint8[::1])")
def numbers_encode(numbers, code, prefix_bit, suffix_bit, prefixes, suffixes):
    """Write uint32[n] from these bits on; returns the bits behind them.

    prefixes, suffixes: uint8, 8 bytes longer than what is written to them; these are overwritten with anything.
    """
    e, golomb = np.uint64(code % GOLOMB), _0 - np.uint64(code >= GOLOMB)
    at, used = prefix_bit >> 3, np.uint64(prefix_bit & 7)
    low_at, low_used = suffix_bit >> 3, np.uint64(suffix_bit & 7)
    word = np.uint64(prefixes[at]) & ((_1 << used) - _1)
    low = np.uint64(suffixes[low_at]) & ((_1 << low_used) - _1)
    for i in range(numbers.size):
        v = np.uint64(numbers[i])
        n = v >> e
        suffix, width = v & ((_1 << e) - _1), e
        if golomb:
            power = bit_length(n + _1) - _1
            width = e + power
            suffix = v - (((_1 << power) - _1) << e)
            n = power
        while used + n > WHOLE_BYTES:
            store64(prefixes, at, word)
            at += 7
            n -= WHOLE_BYTES - used
            word, used = _0, _0
        used += n
        word |= _1 << used
        used += _1
        store64(prefixes, at, word)
        at += np.int64(used >> _3)
        word >>= used & WHOLE_BYTES
        used &= _7
        low |= suffix << low_used
        low_used += width
        store64(suffixes, low_at, low)
        low_at += np.int64(low_used >> _3)
        low >>= low_used & WHOLE_BYTES
        low_used &= _7
    return 8 * at + np.int64(used), 8 * low_at + np.int64(low_used)


@kernel(
    "UniTuple(int64, 2)(Array(uint8, 1, 'C', readonly=True), Array(uint8, 1, 'C', readonly=True), int64, int64, int64, "
    "int64, uint32[::1])"
)
def numbers_decode(prefixes, suffixes, prefix_bit, suffix_bit, code, limit, out):
    """Decode out.size numbers below limit < 2**31 from these bits on; returns the bits behind them.

    Returns (-1, -1) if the streams hold less or a number is too large. Any bytes are safe.
    """
    if code >= GOLOMB:
        return _golomb_decode(prefixes, suffixes, prefix_bit, suffix_bit, code - GOLOMB, limit, out)
    return _rice_decode(prefixes, suffixes, prefix_bit, suffix_bit, code, limit, out)


@helper
def _rice_decode(prefixes, suffixes, prefix_bit, suffix_bit, e, limit, out):
    count, L, E = np.uint64(out.size), np.uint64(limit), np.uint64(e)
    mask = (_1 << E) - _1
    start, bit, j = np.uint64(prefix_bit), np.uint64(suffix_bit), _0
    keep = ~((_1 << np.uint64(prefix_bit & 7)) - _1)
    too_large = False
    for at in range(prefix_bit >> 3, prefixes.size, 8):
        word = word_at(prefixes, at) & keep
        keep = ~_0
        base = np.uint64(8 * at)
        stop = min(count, j + popcount(word))
        loadable = np.int64((bit + (stop - j) * E) >> _3) + 8 <= suffixes.size
        while j < stop:
            end = base + trailing_zeros(word)
            word &= word - _1
            n = end - start
            start = end + _1
            if E == _0:
                low = _0
            elif loadable:
                low = load64(suffixes, np.int64(bit >> _3))
            else:
                low = word_at(suffixes, np.int64(bit >> _3))
            v = (n << E) | ((low >> (bit & _7)) & mask)
            too_large |= (n >= L) | (v >= L)
            out[j] = np.uint32(v)
            j += _1
            bit += E
        if j == count:
            break
    if j < count or too_large:
        return -1, -1
    return np.int64(start), np.int64(bit)


@helper
def _golomb_decode(prefixes, suffixes, prefix_bit, suffix_bit, e, limit, out):
    count, L, E = np.uint64(out.size), np.uint64(limit), np.uint64(e)
    start, bit, j = np.uint64(prefix_bit), np.uint64(suffix_bit), _0
    keep = ~((_1 << np.uint64(prefix_bit & 7)) - _1)
    too_large = False
    for at in range(prefix_bit >> 3, prefixes.size, 8):
        word = word_at(prefixes, at) & keep
        keep = ~_0
        base = np.uint64(8 * at)
        stop = min(count, j + popcount(word))
        loadable = np.int64((bit + np.uint64(64 * 64)) >> _3) + 8 <= suffixes.size
        while j < stop:
            end = base + trailing_zeros(word)
            word &= word - _1
            n = end - start
            start = end + _1
            width = n + E
            too_large |= width > np.uint64(31)  # the number is at least 2**(width - 1)
            width &= np.uint64(31)
            if loadable:
                low = load64(suffixes, np.int64(bit >> _3))
            else:
                low = word_at(suffixes, np.int64(bit >> _3))
            v = (_1 << width) - (_1 << E) + ((low >> (bit & _7)) & ((_1 << width) - _1))
            too_large |= v >= L
            out[j] = np.uint32(v)
            j += _1
            bit += width
        if j == count:
            break
    if j < count or too_large:
        return -1, -1
    return np.int64(start), np.int64(bit)


@kernel("boolean(Array(uint32, 1, 'C', readonly=True), Array(uint32, 1, 'C', readonly=True), int64, uint32[::1])")
def fill_runs(zeros, ones, d, out):
    """The inverse of runs_of: out gets the indices. Returns False unless they are out.size, all below d."""
    k, D = np.uint64(out.size), np.uint64(d)
    position, j = np.uint64(zeros[0]), _0
    for i in range(np.uint64(zeros.size)):
        if i > _0:
            position += np.uint64(zeros[i]) + _1
        more = np.uint64(ones[i])
        if j + more >= k or position + more >= D:
            return False
        out[j] = np.uint32(position)
        for t in range(_1, more + _1):
            out[j + t] = np.uint32(position + t)
        position += more + _1
        j += more + _1
    return j == k
