"""Range asymmetric numeral systems (rANS) for levels: 8 interleaved states, 12-bit frequencies.

Duda, Asymmetric numeral systems, arXiv 1311.2540, 2013; Giesen, Interleaved entropy coders, arXiv 1402.3392, 2014.
A state x is in [2**16, 2**32), and is refilled or relieved by 16 bits. Level i belongs to state i & 7. The encoder goes
from the last level to the first and writes from the end, so that the decoder reads forward.
"""

import numpy as np

from ._compile import kernel
from ._helpers import MANTISSA
from ._intrinsics import helper, load64
from ._tables import TABLE_ROOM, all_equal, count_levels, read_table, write_table

LANES = 8
SCALE = 12  # bits of a frequency
CLASSES = SCALE + 1  # the largest class: 1 + the position of the highest bit of a weight
STATES = 4 * LANES  # bytes before the first refill
_LOW = np.uint64(1 << 16)
_SLOT = np.uint64((1 << SCALE) - 1)
_12, _16, _20, _32, _44 = (np.uint64(x) for x in (12, 16, 20, 32, 44))
_FIELD = np.uint64(0xFFFF)
_LANES, _1 = np.uint64(LANES), np.uint64(1)


@helper
def ans_classes(counts, total, classes, mantissas):
    """Compute what the table says of counts (int64[n], sum `total` >= 1): weights of 4 significant bits, sum about 4096."""
    for s in range(counts.size):
        classes[s] = mantissas[s] = 0
        if counts[s] == 0:
            continue
        weight = max(1, (counts[s] * (1 << SCALE) + total // 2) // total)
        bits = 0
        while weight >> bits:
            bits += 1
        if bits > MANTISSA + 1:
            weight = (weight + (1 << (bits - MANTISSA - 2))) >> (bits - MANTISSA - 1)
            if weight >> (MANTISSA + 1):
                weight >>= 1
                bits += 1
            mantissas[s] = weight & ((1 << MANTISSA) - 1)
        else:
            mantissas[s] = weight - (1 << (bits - 1))
        classes[s] = bits


@helper
def ans_frequencies(classes, mantissas, frequencies):
    """Compute the frequencies of a table: int64[n], sum 4096, at least 1 where the class is not 0. Both sides do so.

    Returns False if the table has fewer than two levels, or only weights of 1.
    """
    present, total = 0, 0
    for s in range(classes.size):
        c, weight = np.int64(classes[s]), 0
        if c > 0:
            present += 1
            weight = (1 << (c - 1)) + (np.int64(mantissas[s]) << max(0, c - 1 - MANTISSA))
            total += weight - 1
        frequencies[s] = weight
    if present < 2 or total == 0:
        return False
    share = (1 << SCALE) - present  # every present level gets 1; the rest is distributed by weight
    below, before = 0, 0
    for s in range(classes.size):
        if frequencies[s] > 0:
            below += frequencies[s] - 1
            now = below * share // total
            frequencies[s] = 1 + now - before
            before = now
    return True


@helper
def _push(x, level, reciprocals, slots, words, p):
    """Relieve the state if necessary, then encode one level. Returns the state and the index of the last word written."""
    slot = slots[level]  # the frequency, 4096 - frequency, the sum of the frequencies before
    words[p - _1] = np.uint16(x)
    full = (x >> _20) >= (slot >> _32)
    x = x >> _16 if full else x
    p -= np.uint64(full)
    # x // frequency: the reciprocal is ceil(2**44 / frequency) and x < frequency << 20, so this is exact.
    quotient = (x * reciprocals[level]) >> _44
    return x + (slot & _FIELD) + quotient * ((slot >> _16) & _FIELD), p


@helper
def ans_encode(levels, frequencies, words):
    """Encode levels (uint8[k]), each of frequency 1 to 4095. words: uint16[k + 2 * LANES + 1], written from the end.

    Returns where the stream starts: the LANES states come first, low half first, then the refills.
    """
    reciprocals, slots = np.zeros(256, np.uint64), np.zeros(256, np.uint64)
    below = np.uint64(0)
    for s in range(frequencies.size):
        f = np.uint64(frequencies[s])
        if f > 0:
            reciprocals[s] = ((_1 << _44) + f - _1) // f
            slots[s] = (f << _32) | (((_1 << _12) - f) << _16) | below
            below += f
    states = np.full(LANES, _LOW)
    p = np.uint64(words.size)
    whole = np.uint64(levels.size) // _LANES * _LANES
    for lane in range(np.uint64(levels.size) - whole, np.uint64(0), -1):
        lane = np.uint64(lane) - _1
        states[lane], p = _push(states[lane], levels[whole + lane], reciprocals, slots, words, p)
    x0, x1, x2, x3, x4, x5, x6, x7 = (states[0], states[1], states[2], states[3], states[4], states[5], states[6], states[7])
    i = whole
    while i > 0:
        x7, p = _push(x7, levels[i - np.uint64(1)], reciprocals, slots, words, p)
        x6, p = _push(x6, levels[i - np.uint64(2)], reciprocals, slots, words, p)
        x5, p = _push(x5, levels[i - np.uint64(3)], reciprocals, slots, words, p)
        x4, p = _push(x4, levels[i - np.uint64(4)], reciprocals, slots, words, p)
        x3, p = _push(x3, levels[i - np.uint64(5)], reciprocals, slots, words, p)
        x2, p = _push(x2, levels[i - np.uint64(6)], reciprocals, slots, words, p)
        x1, p = _push(x1, levels[i - np.uint64(7)], reciprocals, slots, words, p)
        x0, p = _push(x0, levels[i - np.uint64(8)], reciprocals, slots, words, p)
        i -= _LANES
    for x in (x7, x6, x5, x4, x3, x2, x1, x0):
        words[p - _1] = np.uint16(x >> _16)
        words[p - np.uint64(2)] = np.uint16(x)
        p -= np.uint64(2)
    return np.int64(p)


@helper
def _pull(x, table, data, at):
    """Decode one level, and refill the state if necessary. Reads 8 bytes at data[at]."""
    entry = np.uint64(table[x & _SLOT])
    x = ((entry >> np.uint64(8)) & _SLOT) * (x >> _12) + (entry >> _20)
    # Without a branch, which would be mispredicted: refill is 0 or 1.
    refill = (x - _LOW) >> np.uint64(63)
    x = (x << (refill << np.uint64(4))) | (load64(data, at) & (_FIELD * refill))
    return x, at + (np.int64(refill) << 1), np.uint8(entry)


@helper
def ans_decode(data, frequencies, out):
    """Fill out (uint8[k]). frequencies: int64[n], n <= 256, sum 4096, each below 4096.

    Returns False if data (uint8[m], m >= STATES) is not exactly such a stream. Any content is safe.
    """
    table = np.empty(1 << SCALE, np.uint32)  # level, frequency, place within the level's slots
    slot = 0
    for s in range(frequencies.size):
        part = table[slot : slot + frequencies[s]]
        for j in range(part.size):
            part[j] = np.uint32(s | (frequencies[s] << 8) | (j << 20))
        slot += frequencies[s]
    states = np.empty(LANES, np.uint64)
    for pair in range(LANES // 2):
        word = load64(data, 8 * pair)
        states[2 * pair], states[2 * pair + 1] = word & np.uint64(0xFFFFFFFF), word >> _32
    x0, x1, x2, x3, x4, x5, x6, x7 = (states[0], states[1], states[2], states[3], states[4], states[5], states[6], states[7])
    at, i = STATES, np.uint64(0)
    whole = np.uint64(out.size) // _LANES * _LANES
    while i < whole and at + 2 * LANES + 6 <= data.size:
        x0, at, out[i] = _pull(x0, table, data, at)
        x1, at, out[i + np.uint64(1)] = _pull(x1, table, data, at)
        x2, at, out[i + np.uint64(2)] = _pull(x2, table, data, at)
        x3, at, out[i + np.uint64(3)] = _pull(x3, table, data, at)
        x4, at, out[i + np.uint64(4)] = _pull(x4, table, data, at)
        x5, at, out[i + np.uint64(5)] = _pull(x5, table, data, at)
        x6, at, out[i + np.uint64(6)] = _pull(x6, table, data, at)
        x7, at, out[i + np.uint64(7)] = _pull(x7, table, data, at)
        i += _LANES
    states[0], states[1], states[2], states[3], states[4], states[5], states[6], states[7] = x0, x1, x2, x3, x4, x5, x6, x7
    last = np.zeros(8, np.uint8)
    while i < np.uint64(out.size):  # near the end of the data: a refill may not be there
        lane = i & np.uint64(7)
        for j in range(2):
            last[j] = data[at + j] if at + j < data.size else np.uint8(0)
        states[lane], used, out[i] = _pull(states[lane], table, last, 0)
        at += used
        i += _1
    good = at == data.size
    for lane in range(LANES):
        good &= states[lane] == _LOW
    return good


@kernel("int64(Array(uint8, 1, 'C', readonly=True), int64, int64, uint16[::1], uint8[::1])")
def ans_pack(levels, alphabet, limit, words, out):
    """Write the table of frequencies and the stream of uint8[k], each below `alphabet`; returns the bytes used.

    Returns 0 if only one level occurs, and -1 if at least `limit` bytes would be used. words: uint16[k + 2 * LANES + 1], to
    work in; out: uint8[limit].
    """
    if all_equal(levels):
        return 0
    if alphabet // 8 + STATES >= limit:  # a level takes at least one bit of the table
        return -1
    counts = np.empty(alphabet, np.int64)
    count_levels(levels, counts)
    classes, mantissas = np.empty(alphabet, np.uint8), np.empty(alphabet, np.uint8)
    ans_classes(counts, levels.size, classes, mantissas)
    table = np.empty(TABLE_ROOM, np.uint8)
    end = write_table(classes, mantissas, MANTISSA, table)
    ans_frequencies(classes, mantissas, counts)
    start = ans_encode(levels, counts, words)
    size = end + 2 * (words.size - start)
    if size >= limit:
        return -1
    out[:end] = table[:end]
    for i in range(words.size - start):
        word = words[start + i]
        out[end + 2 * i] = np.uint8(word & np.uint16(255))
        out[end + 2 * i + 1] = np.uint8(word >> np.uint16(8))
    return size


@kernel("int64(Array(uint8, 1, 'C', readonly=True), int64, uint8[::1])")
def ans_unpack(body, alphabet, out):
    """Decode what ans_pack has written to out, uint8[k]. Any content is safe.

    Returns 0; -1 if the table is damaged, and -2 if the stream is.
    """
    classes, mantissas = np.empty(alphabet, np.uint8), np.empty(alphabet, np.uint8)
    frequencies = np.empty(alphabet, np.int64)
    start = read_table(body, MANTISSA, CLASSES, classes, mantissas)
    if start < 0 or body.size < start + STATES or not ans_frequencies(classes, mantissas, frequencies):
        return -1
    return 0 if ans_decode(body[start:], frequencies, out) else -2
