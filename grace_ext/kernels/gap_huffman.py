"""Huffman codes of gap classes: one code, or one for each of 8 contexts, which are lengths of the gap before.

The class of a gap g, with s = max(0, bit length of g - 3), is 4 s + (g >> s); the lower s bits of g follow the code as they
are.
"""

import numpy as np

from ._compile import kernel
from ._helpers import WHOLE_BYTES, log2, word_at
from ._huffman import canonical_codes, code_lengths, is_code
from ._intrinsics import bit_length, helper, store64, trailing_zeros

CLASSES = 120  # of gaps below 2**31
CONTEXTS = 8
ROW = 128  # entries for the classes of one context
LIMIT = 10  # most bits of a code, so that the decoder's tables of all contexts fit into the L1 cache
_0, _1, _2, _3, _7 = (np.uint64(x) for x in (0, 1, 2, 3, 7))
_MASK = np.uint64((1 << LIMIT) - 1)
_WAYS = 4
_FEW = 4096


@helper
def _context_after(symbol):
    """Return the context after a gap, by its bit length: 0, 1, 2, 3, 4, 5, 6 to 7, 8 and more."""
    gap_bits = np.int64(bit_length(np.uint64(symbol))) if symbol < 8 else 3 + (symbol - 4) // 4
    return min(gap_bits, 6) if gap_bits < 8 else 7


@helper
def _contexts():
    table = np.zeros(ROW, np.uint64)
    for symbol in range(CLASSES):
        table[symbol] = np.uint64(_context_after(symbol))
    return table


@helper
def _class_of(gap):
    """Return (class, extra bits) of a gap."""
    bits = bit_length(gap)
    shift = bits - _3 if bits > _3 else _0
    return (shift << _2) + (gap >> shift), shift


@helper
def count_gaps(indices, counts, classes):
    """Count how often each class occurs in each context: counts, int64[CONTEXTS * ROW]; and in all: classes, int64[ROW].

    indices: uint32[k], strictly ascending, below 2**31.
    """
    counts[:] = 0
    contexts = _contexts()
    previous, context = _0, _0  # previous: one past the last index
    if indices.size <= _FEW:
        for i in range(indices.size):
            x = np.uint64(indices[i])
            symbol, _ = _class_of(x - previous)
            previous = x + _1
            counts[(context << _7) | symbol] += 1
            context = contexts[symbol]
    else:
        # Four counters for each class take turns: adding to one that has just been written would have to wait.
        ways = np.zeros(_WAYS * CONTEXTS * ROW, np.uint32)
        for i in range(np.uint64(indices.size)):
            x = np.uint64(indices[i])
            symbol, _ = _class_of(x - previous)
            previous = x + _1
            ways[((i & _3) << np.uint64(10)) | (context << _7) | symbol] += np.uint32(1)
            context = contexts[symbol]
        for j in range(counts.size):
            for way in range(_WAYS):
                counts[j] += np.int64(ways[way * CONTEXTS * ROW + j])
    classes[:] = 0
    for context in range(CONTEXTS):
        row = counts[context * ROW : (context + 1) * ROW]
        for s in range(ROW):
            classes[s] += row[s]


@helper
def _used_classes(classes):
    """Return one more than the highest class that occurs, at least 1. classes: int64[ROW]."""
    used = ROW
    while used > 1 and classes[used - 1] == 0:
        used -= 1
    return used


@helper
def _zigzag(lengths, s):
    step = np.int64(lengths[s]) - (np.int64(lengths[s - 1]) if s > 0 else 0)
    return 2 * step if step >= 0 else -2 * step - 1


@helper
def _plan(counts, rows, classes, lengths):
    """Fill the lengths of the rows; returns the bits of all tables and codes, extra bits included."""
    bits = np.int64(0)
    for row in range(rows):
        first = row * ROW
        code_lengths(counts[first : first + ROW], LIMIT, lengths[first : first + ROW])
        for s in range(classes):
            bits += _zigzag(lengths[first:], s) + 1
            bits += counts[first + s] * (np.int64(lengths[first + s]) + max(0, s // 4 - 1))
    return bits


@helper
def least_run_bits(classes):
    """Return a lower bound of the bits that runs of zeros need in any code of runs.py, if they are gaps of these classes.

    classes: int64[ROW], from count_gaps. Each gap counts as the smallest of its class.
    """
    numbers, counts, n, largest = np.empty(CLASSES, np.int64), np.empty(CLASSES, np.int64), 0, 0
    for s in range(1, CLASSES):
        if classes[s] > 0:
            shift = max(0, s // 4 - 1)
            numbers[n], counts[n] = ((s - 4 * shift) << shift) - 1, classes[s]
            largest = numbers[n]
            n += 1
    best = np.int64(0x7FFFFFFFFFFFFFFF)
    for e in range(31):
        rice, golomb = np.int64(0), np.int64(0)
        for j in range(n):
            quotient = numbers[j] >> e
            rice += counts[j] * (e + 1 + quotient)
            golomb += counts[j] * (e - 1 + 2 * np.int64(bit_length(np.uint64(quotient + 1))))
        best = min(best, rice, golomb)
        if largest >> e == 0:  # from here on, each further bit costs all runs one
            break
    return best


@helper
def _entropy_bits(row, classes):
    """Return a lower bound of the bits of a table for a row, int64[ROW], and of its classes' codes, without extra bits."""
    total, bits, before = np.int64(0), np.float64(classes), np.int64(0)
    for s in range(classes):
        n = row[s]
        if n > 0:
            total += n
            bits -= n * log2(np.float64(n))
            bits += 0.0 if before > 0 else 2.0  # a length after 0 takes two ones at least, and 0 after a length one
        elif before > 0:
            bits += 1.0
        before = n
    if total > 0:
        bits += total * (log2(np.float64(total)) - 4e-4)  # the logarithms are within 1e-4
    return bits


@helper
def plan_gap_codes(counts, classes, lengths):
    """Return (rows, classes, bits) of the shorter of one code (1 row) and one for each context (CONTEXTS rows).

    counts, classes: from count_gaps; lengths: uint8[CONTEXTS * ROW], of which the rows are filled.
    """
    used = _used_classes(classes)
    alone = np.zeros(ROW, np.uint8)
    bits = _plan(classes, 1, used, alone)
    least = 0.0  # bits of the codes for each context; with few positions, their tables are often too long
    for s in range(used):
        least += classes[s] * max(0, s // 4 - 1)
    for row in range(CONTEXTS):
        least += _entropy_bits(counts[row * ROW : (row + 1) * ROW], used)
    if least < bits:
        bits_in_contexts = _plan(counts, CONTEXTS, used, lengths)
        if bits_in_contexts < bits:
            return CONTEXTS, used, bits_in_contexts
    lengths[:ROW] = alone
    return 1, used, bits


@kernel("UniTuple(int64, 4)(Array(uint32, 1, 'C', readonly=True), int64[::1], uint8[::1])")
def survey_gaps(indices, counts, lengths):
    """Do all that codecs are compared by: count the gaps, plan their codes, and bound the bits of runs.

    indices: uint32[k], strictly ascending, below 2**31. counts: int64[(CONTEXTS + 1) * ROW], written: the contexts' counts,
    then the sums over them. lengths: uint8[CONTEXTS * ROW], written by plan_gap_codes. Returns its (rows, classes, bits), and
    least_run_bits.
    """
    in_contexts, classes = counts[: CONTEXTS * ROW], counts[CONTEXTS * ROW :]
    count_gaps(indices, in_contexts, classes)
    rows, used, bits = plan_gap_codes(in_contexts, classes, lengths)
    return rows, used, bits, least_run_bits(classes)


@helper
def _put(out, at, word, used, bits, count):
    word |= bits << used
    used += count
    store64(out, at, word)
    return at + np.int64(used >> _3), word >> (used & WHOLE_BYTES), used & _7


@kernel("void(Array(uint32, 1, 'C', readonly=True), Array(uint8, 1, 'C', readonly=True), int64, int64, uint8[::1])")
def gap_huffman_encode(indices, lengths, rows, classes, out):
    """Write the tables and the codes.

    lengths, rows, classes: from plan_gap_codes for these indices. out: uint8, 8 bytes longer than the planned bits take; the
    last 8 bytes are overwritten with anything.
    """
    at, word, used = 0, _0, _0
    codes = np.zeros(CONTEXTS * ROW, np.uint32)
    for row in range(rows):
        table = lengths[row * ROW : (row + 1) * ROW]
        canonical_codes(table, LIMIT, codes[row * ROW : (row + 1) * ROW])
        for s in range(classes):
            ones = np.uint64(_zigzag(table, s))
            at, word, used = _put(out, at, word, used, (_1 << ones) - _1, ones + _1)
    contexts = _contexts()
    if rows == 1:
        contexts[:] = _0
    previous, context = _0, _0
    for i in range(indices.size):
        x = np.uint64(indices[i])
        gap = x - previous
        previous = x + _1
        symbol, extra = _class_of(gap)
        code = np.uint64(codes[(context << _7) | symbol])
        context = contexts[symbol]
        length = code >> np.uint64(16)
        bits = (code & np.uint64(0xFFFF)) | (gap & ((_1 << extra) - _1)) << length
        at, word, used = _put(out, at, word, used, bits, length + extra)


@kernel("boolean(Array(uint8, 1, 'C', readonly=True), int64, int64, int64, uint32[::1])")
def gap_huffman_decode(section, rows, classes, d, out):
    """Decode out.size indices below d. Returns False unless section is exactly their tables and codes.

    section: uint8[m], m < 2**31; rows: 1 or CONTEXTS; 1 <= classes <= CLASSES. Any content is safe.
    """
    bit, bits = _0, np.uint64(8 * section.size)
    lengths, codes = np.zeros(ROW, np.uint8), np.zeros(ROW, np.uint32)
    # An entry holds the bits of the code and of what follows it (6), the class (7), and the next context (3).
    entries = np.empty(rows << LIMIT, np.uint16)
    entries[:] = ROW - 1 << 6 | 1  # a class that does not exist, where no code begins
    for row in range(rows):
        length = np.int64(0)
        for s in range(classes):
            zigzag = trailing_zeros(~(word_at(section, np.int64(bit >> _3)) >> (bit & _7)))
            bit += zigzag + _1
            length += -np.int64((zigzag + _1) >> _1) if zigzag & _1 else np.int64(zigzag >> _1)
            if bit > bits or not 0 <= length <= LIMIT:
                return False
            lengths[s] = length
        if not is_code(lengths, LIMIT):
            return False
        canonical_codes(lengths, LIMIT, codes)
        for s in range(classes):
            if lengths[s] > 0:
                total = np.int64(lengths[s]) + max(0, s // 4 - 1)
                entry = np.uint16((_context_after(s) if rows > 1 else 0) << 13 | s << 6 | total)
                for slot in range(np.int64(codes[s] & np.uint32(0xFFFF)), 1 << LIMIT, 1 << np.int64(lengths[s])):
                    entries[row << LIMIT | slot] = entry
    position, context, wrong = _0, _0, False  # position: one past the last index
    for i in range(out.size):
        word = word_at(section, np.int64(bit >> _3)) >> (bit & _7)
        entry = np.uint64(entries[context << np.uint64(LIMIT) | (word & _MASK)])
        total, symbol = entry & np.uint64(63), (entry >> np.uint64(6)) & np.uint64(127)
        context = entry >> np.uint64(13)
        shift = symbol >> _2
        shift = shift - _1 if shift > _0 else _0
        gap = ((symbol - (shift << _2)) << shift) | ((word >> (total - shift)) & ((_1 << shift) - _1))
        wrong |= symbol == np.uint64(ROW - 1)
        bit += total
        position += gap + _1
        out[i] = np.uint32(position - _1)
    if wrong or position > np.uint64(d) or (bit + _7) >> _3 != np.uint64(section.size):
        return False
    return bit & _7 == _0 or section[section.size - 1] >> np.uint8(bit & _7) == 0
