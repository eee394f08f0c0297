"""Bloom filters in which 64 positions are looked up at once.

The d positions are cut into 64 columns of `stride` = ceil(d / 64). A position in column c belongs to the group (offset in
the column + turn of c) % stride, so a group has one position of each column. These are far apart, and the turns are
random, so that no pattern in the positions fills groups. Hash function j maps a group to a word of 64 bits and a rotation,
and so the position to bit (c + rotation) % 64 of that word. This hashes each position evenly to all bits, independently for
each j. The words of a group, rotated back and combined by AND, answer for 64 positions.
"""

import numpy as np

from ._compile import kernel
from ._intrinsics import helper, popcount, trailing_zeros

MAX_HASHES = 16
SHARES = 1024  # points that the members of a conflict set share
SURE = MAX_HASHES * SHARES // 2 + 1  # more than any sum of shares
_0, _1, _6, _63, _64 = (np.uint64(x) for x in (0, 1, 6, 63, 64))
_CHOICE, _TURNS, _FUNCTIONS = 0, 1, 2  # the purposes that seeds are derived for; for hash function j it is _FUNCTIONS + j
_STAGES = (
    (32, 0x00000000FFFFFFFF),
    (16, 0x0000FFFF0000FFFF),
    (8, 0x00FF00FF00FF00FF),
    (4, 0x0F0F0F0F0F0F0F0F),
    (2, 0x3333333333333333),
    (1, 0x5555555555555555),
)


@helper
def _murmur(x):
    """Return the 32-bit finalizer of MurmurHash3. Each step is wrapped to 32 bits so that it vectorises."""
    x = np.uint32(np.uint32(x ^ np.uint32(x >> np.uint32(16))) * np.uint32(0x85EBCA6B))
    x = np.uint32(np.uint32(x ^ np.uint32(x >> np.uint32(13))) * np.uint32(0xC2B2AE35))
    return np.uint32(x ^ np.uint32(x >> np.uint32(16)))


@helper
def _derived(seed, what):
    return _murmur(np.uint32(seed + np.uint32(np.uint32(what) * np.uint32(0x9E3779B9))))


@helper
def _below(x, n):
    """Return a number below n <= 2**32, made from 32 random bits."""
    return np.uint32((np.uint64(x) * np.uint64(n)) >> np.uint64(32))


@helper
def _turns(stride, seed):
    """Return the turns of the columns: int64[64], each below the stride."""
    own, turns = _derived(seed, _TURNS), np.empty(64, np.int64)
    for c in range(64):
        turns[c] = np.int64(_below(_murmur(np.uint32(np.uint32(c) ^ own)), stride))
    return turns


@helper
def _locate(positions, c, stride, turns, groups, columns):
    """Compute groups and columns of up to 64 ascending positions; returns the column of the last.

    c: the column of an earlier position.
    """
    for t in range(positions.size):
        i = np.int64(positions[t])
        while i >= (c + 1) * stride:
            c += 1
        group = i - c * stride + turns[c]
        groups[t] = np.uint32(group if group < stride else group - stride)
        columns[t] = np.uint32(c)
    return c


@helper
def _hash(groups, own, words, targets, rotations):
    """Compute the words and rotations of 64 groups under the hash function with the seed `own`."""
    count = np.uint64(words)
    for t in range(64):
        x = _murmur(np.uint32(groups[t] ^ own))
        targets[t] = _below(x, count)
        rotations[t] = np.uint32(x & np.uint32(63))


@helper
def _work():
    """Return arrays to work in: groups, columns, targets and rotations, uint32[64] each."""
    return np.zeros(64, np.uint32), np.empty(64, np.uint32), np.empty(64, np.uint32), np.empty(64, np.uint32)


@helper
def _bits(positions, c, stride, hashes, seed, words, turns, work, bits):
    """bits[j, t] = the bit of positions[t] (up to 64 of them) under hash function j. Other arguments are as in _locate."""
    groups, columns, targets, rotations = work
    c = _locate(positions, c, stride, turns, groups, columns)
    for j in range(hashes):
        _hash(groups, _derived(seed, _FUNCTIONS + j), words, targets, rotations)
        for t in range(64):
            bits[j, t] = (np.uint64(targets[t]) << _6) + (np.uint64(columns[t] + rotations[t]) & _63)
    return c


@kernel("void(Array(uint32, 1, 'C', readonly=True), int64, int64, uint32, uint64[::1])")
def bloom_insert(indices, stride, hashes, seed, words):
    """Set the bits of `indices` (uint32[r], ascending, below 64 * stride) in `words` (zeroed)."""
    work, bits, turns, c = _work(), np.empty((hashes, 64), np.uint64), _turns(stride, seed), 0
    for start in range(0, indices.size, 64):
        n = min(64, indices.size - start)
        c = _bits(indices[start : start + n], c, stride, hashes, seed, words.size, turns, work, bits)
        for j in range(hashes):
            for t in range(n):
                words[bits[j, t] >> _6] |= _1 << (bits[j, t] & _63)


@helper
def _transpose(block):
    """Transpose uint64[64] as a matrix of bits: bit c of block[t] <-> bit t of block[c]."""
    for width, mask in _STAGES:
        shift, keep = np.uint64(width), np.uint64(mask)
        for start in range(0, 64, 2 * width):
            for t in range(start, start + width):
                low, high = block[t], block[t + width]
                swap = ((low >> shift) ^ high) & keep
                block[t] = low ^ (swap << shift)
                block[t + width] = high ^ swap


@kernel("void(Array(uint64, 1, 'C', readonly=True), int64, int64, uint32, uint64[:, ::1])")
def bloom_query(words, stride, hashes, seed, found):
    """Bit g & 63 of found[c, g >> 6] = whether the position of group g in column c is in the filter.

    found: uint64[64, at least ceil(stride / 64)]; bits of groups from the stride on have no meaning.
    """
    block = np.empty(64, np.uint64)
    groups, _, targets, rotations = _work()
    for b in range((stride + 63) // 64):
        for t in range(64):
            groups[t] = np.uint32(64 * b + t)
            block[t] = ~_0
        for j in range(hashes):
            _hash(groups, _derived(seed, _FUNCTIONS + j), words.size, targets, rotations)
            for t in range(64):
                word, rotation = words[targets[t]], np.uint64(rotations[t])
                block[t] &= (word >> rotation) | (word << ((_64 - rotation) & _63))
        _transpose(block)
        for c in range(64):
            found[c, b] = block[c]


@helper
def _piece(row, first, last, at):
    """Return row[at] with only the bits of the groups first to last - 1."""
    word = row[at]
    if at == first >> 6:
        word &= ~_0 << np.uint64(first & 63)
    if at == last >> 6:
        word &= (_1 << np.uint64(last & 63)) - _1
    return word


@helper
def _spans(c, d, stride, turn):
    """Return where column c is in its row: groups first to middle - 1, then 0 to last - 1."""
    length = min(stride, max(0, d - c * stride))
    end = turn + length
    return turn, min(end, stride), max(0, end - stride)


@kernel("int64(uint64[:, ::1], int64, int64, uint32)")
def bloom_count(found, d, stride, seed):
    """Return how many of the d positions are in the filter."""
    turns, n = _turns(stride, seed), _0
    for c in range(64):
        first, middle, last = _spans(c, d, stride, turns[c])
        for at in range(first >> 6, (middle + 63) >> 6):
            n += popcount(_piece(found[c], first, middle, at))
        for at in range((last + 63) >> 6):
            n += popcount(_piece(found[c], 0, last, at))
    return np.int64(n)


@helper
def _append(row, first, last, base, out, n):
    """Append base + g for the groups g from first to last - 1 that are set in row. Returns the new length."""
    for at in range(first >> 6, (last + 63) >> 6):
        word, start = _piece(row, first, last, at), np.uint64(base + 64 * at)
        if n + 4 <= out.size:  # four at a time without a branch: the next word overwrites what is too much
            count = np.int64(popcount(word))
            for i in range(4):
                out[n + i] = np.uint32(start + trailing_zeros(word))
                word &= word - _1
            n += min(4, count)
        while word:
            out[n] = np.uint32(start + trailing_zeros(word))
            n += 1
            word &= word - _1
    return n


@kernel("void(uint64[:, ::1], int64, int64, uint32, uint32[::1])")
def bloom_positions(found, d, stride, seed, out):
    """Write the positions in the filter, ascending. out: uint32[bloom_count(...)]."""
    turns, n = _turns(stride, seed), 0
    for c in range(64):
        first, middle, last = _spans(c, d, stride, turns[c])
        base = c * stride - first
        n = _append(found[c], first, middle, base, out, n)
        n = _append(found[c], 0, last, base + stride, out, n)


@kernel("void(Array(uint32, 1, 'C', readonly=True), int64, int64, uint32, uint8[::1], uint16[::1])")
def bloom_scores(positives, stride, hashes, seed, sizes, scores):
    """Score how likely each positive is a true one, from the conflict sets.

    The conflict set of a bit is the set of positives that have it. The only member of a set scores SURE, since something
    must have set the bit. A set with a sure member tells nothing about its others. Each remaining set of s positives gives
    SHARES // s points to its members. positives: all of them, ascending; sizes: uint8, one for every bit of the filter,
    zeroed; beyond 255 counts as 255. scores: uint16[n].
    """
    work, bits, turns, words = _work(), np.empty((hashes, 64), np.uint64), _turns(stride, seed), sizes.size >> 6
    points, sure = np.zeros(256, np.uint16), np.empty(64, np.uint8)
    chosen = np.empty(64, np.int64)
    for s in range(1, 256):
        points[s] = SHARES // s
    c = 0
    for start in range(0, positives.size, 64):
        n = min(64, positives.size - start)
        c = _bits(positives[start : start + n], c, stride, hashes, seed, words, turns, work, bits)
        for j in range(hashes):
            for t in range(n):
                size = sizes[bits[j, t]]
                sizes[bits[j, t]] = size + np.uint8(size < 255)
    c = 0
    for start in range(0, positives.size, 64):
        n = min(64, positives.size - start)
        c = _bits(positives[start : start + n], c, stride, hashes, seed, words, turns, work, bits)
        sure[:] = 0
        for j in range(hashes):
            for t in range(n):
                sure[t] |= sizes[bits[j, t]] == 1
        count = 0
        for t in range(n):
            scores[start + t] = SURE * sure[t]
            chosen[count] = t
            count += sure[t]
        for j in range(hashes):
            for t in range(count):
                sizes[bits[j, chosen[t]]] = 0
    c = 0
    for start in range(0, positives.size, 64):
        n = min(64, positives.size - start)
        c = _bits(positives[start : start + n], c, stride, hashes, seed, words, turns, work, bits)
        for t in range(n):
            total = np.uint32(scores[start + t])
            for j in range(hashes):
                total += points[sizes[bits[j, t]]]
            scores[start + t] = total


@kernel("void(Array(uint32, 1, 'C', readonly=True), Array(uint16, 1, 'C', readonly=True), uint32, uint32[::1])")
def bloom_choose(positives, scores, seed, out):
    """Choose the out.size positives with the highest scores (up to SURE), ascending; ties are broken at random.

    out.size <= positives.size.
    """
    of_score = np.zeros(SURE + 1, np.int64)
    for t in range(scores.size):
        of_score[scores[t]] += 1
    lowest, left = SURE, out.size
    while left > of_score[lowest]:
        left -= of_score[lowest]
        lowest -= 1
    own, n, tied, rest = _derived(seed, _CHOICE), 0, np.uint32(0), np.uint64(of_score[lowest])
    for t in range(positives.size):
        if n == out.size:
            break
        tie = scores[t] == lowest
        drawn = np.int64(_below(_murmur(np.uint32(tied ^ own)), rest)) < left
        out[n] = positives[t]
        n += (scores[t] > lowest) | (tie & drawn)
        left -= tie & drawn
        tied = np.uint32(tied + np.uint32(tie))
        rest -= np.uint64(tie)
