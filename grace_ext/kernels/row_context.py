"""Positions in a table of rows, sorted by what the rows above hold in the same column; and how wide such a table seems to be.

The positions are those in the compact domain of the touched rows (rows.py). The history of a column is a number: bit j tells
whether the column is in the support in the (j + 1)-th touched row above. All elements with the same history form a class, in
which they are counted from 0 in the order of their positions. Both ways go over words of 64 elements, whose histories are the
support, shifted by rows; joining knows the support above only, so that a word of it has no more elements than a row.
"""

import math

import numpy as np

from ._compile import kernel
from ._intrinsics import helper, popcount, trailing_zeros
from ._spread import spread

_0, _1, _63 = np.uint64(0), np.uint64(1), np.uint64(63)
_ASIDE = np.uint32(5)
_LIKELY, _CLEARLY = 2.5, 5.0  # standard deviations that repetitions take
_SOON = 2  # after so many windows a width is given up
_BETTER = 1.5  # so many times clearer a multiple of a width has to be


@helper
def _repetitions(indices, width, windows, size, seen):
    """Return how many standard deviations more columns repeat from one touched row to the next than by chance.

    The result is 0 where no more do so in the first windows. seen: uint32[width or more], to work in: the touched row, counted
    from 2, in which a column was last seen.
    """
    seen[:width] = np.uint32(0)
    row, last, hits, others = np.uint32(1), np.int64(-1), 0, 0
    for window in range(windows):
        if window == _SOON and hits <= others:
            return 0.0
        first = (2 * window + 1) * (indices.size - size) // (2 * windows)
        for i in range(first, first + size):
            quotient = np.uint32(indices[i] // width)
            column = np.uint32(indices[i] - np.uint32(quotient * width))
            if np.int64(quotient) != last:
                last = np.int64(quotient)
                row = np.uint32(row + np.uint32(1))
            if column + _ASIDE < width:  # on the right, where this row has not come to yet
                above = np.uint32(row - np.uint32(1))
                repeated, aside = seen[column] == above, seen[column + _ASIDE] == above
                hits += np.int64(repeated > aside)
                others += np.int64(aside > repeated)
            seen[column] = row
    return (hits - others) / math.sqrt(hits + others + 1.0)


@helper
def _clearest(widths, repetitions):
    """Return the width whose columns repeat most; 0 if with none of them they clearly do. A multiple has to be much better."""
    best, most = np.int64(0), _CLEARLY
    for i in range(widths.size):
        multiple = best > 0 and np.int64(widths[i]) % best == 0
        if repetitions[i] > (_BETTER * most if multiple else most):
            best, most = np.int64(widths[i]), repetitions[i]
    return best


@kernel("int64(Array(uint32, 1, 'C', readonly=True), Array(uint32, 1, 'C', readonly=True), int64, int64, int64)")
def likely_width(indices, widths, windows, size, more):
    """Return the width with which columns repeat most from one touched row to the next; 0 if with none of them they clearly do.

    indices: uint32[k], strictly ascending; widths: uint32[n], ascending, above _ASIDE. Columns are compared in some windows of
    so many positions, windows * size <= k, and with columns a little aside, which tell how many repeat by chance. Widths that
    are only likely are compared in windows of more positions: size <= more, windows * more <= k.
    """
    seen = np.empty(widths[widths.size - 1], np.uint32)
    repetitions = np.empty(widths.size, np.float64)
    for i in range(widths.size):
        repetitions[i] = _repetitions(indices, widths[i], windows, size, seen)
    best = _clearest(widths, repetitions)
    if best == 0 and more > size:
        for i in range(widths.size):
            if repetitions[i] > _LIKELY:
                repetitions[i] = _repetitions(indices, widths[i], windows, more, seen)
        best = _clearest(widths, repetitions)
    return best


@helper
def _bits_at(bitmap, at):
    """Return 64 bits from bit `at` on."""
    word, shift = at >> 6, np.uint64(at & 63)
    return (bitmap[word] >> shift) | ((bitmap[word + 1] << _1) << (_63 - shift))


@helper
def _split_elements(bitmap, at, width, elements, above, masks):
    """Split up to 64 elements, one bit for each, by their history.

    bitmap: the support, with an empty one in front of it, in which the elements begin at bit `at`. above: uint64[history], written:
    which elements j + 1 touched rows above are in the support. masks: uint64[2**history], written: which of `elements` have which
    history.
    """
    masks[0], size = elements, 1
    for j in range(above.size):
        at -= width
        above[j] = _bits_at(bitmap, at)
        for h in range(size):
            masks[h + size] = masks[h] & above[j]
            masks[h] &= ~above[j]
        size *= 2


@kernel("void(Array(uint32, 1, 'C', readonly=True), int64, int64, int64, uint64[::1], uint32[::1], int64[::1], int64[::1])")
def split_by_history(compact, width, domain, history, bitmap, out, counts, domains):
    """Write the positions of each class to out: uint32[k], class after class, ascending in each.

    compact: uint32[k], strictly ascending, below domain; history: bits of a column's history, 1 to 8. bitmap: uint64, to work in,
    of at least (domain + history * width) // 64 + 2. counts, domains: int64[2**history], written: positions and elements of
    each class.
    """
    words, before = (domain + 63) >> 6, (history * width + 63) >> 6  # those of the table, and those in front of it
    bitmap[: before + words] = _0
    for i in range(compact.size):
        bitmap[before + np.int64(compact[i] >> 6)] |= _1 << np.uint64(compact[i] & 63)
    above, masks = np.empty(history, np.uint64), np.empty(counts.size, np.uint64)
    counts[:] = 0
    for word in range(words):
        support = bitmap[before + word]
        if support != _0:
            _split_elements(bitmap, (before + word) << 6, width, support, above, masks)
            for h in range(counts.size):
                counts[h] += np.int64(popcount(masks[h]))
    places, total = np.empty(counts.size, np.int64), np.int64(0)
    for h in range(counts.size):
        places[h] = total
        total += counts[h]
    domains[:] = 0
    for word in range(words):
        beyond = np.uint64(max(0, ((word + 1) << 6) - domain))
        _split_elements(bitmap, (before + word) << 6, width, ~_0 >> beyond, above, masks)
        support = bitmap[before + word]
        while support != _0:
            bit = trailing_zeros(support)
            h = 0
            for j in range(history):
                h |= np.int64((above[j] >> bit) & _1) << j
            out[places[h]] = np.uint32(domains[h] + np.int64(popcount(masks[h] & ((_1 << bit) - _1))))
            places[h] += 1
            support &= support - _1
        for h in range(counts.size):
            domains[h] += np.int64(popcount(masks[h]))


@kernel(
    "boolean(Array(uint32, 1, 'C', readonly=True), int64, int64, int64, Array(int64, 1, 'C', readonly=True),"
    " Array(int64, 1, 'C', readonly=True), uint64[::1], uint64[::1], uint32[::1])"
)
def join_by_history(positions, width, domain, history, counts, domains, bitmap, classes, out):
    """The inverse of split_by_history: out gets compact. Returns False unless every class has so many elements.

    positions: uint32[k], counts of each class, ascending and below its domain; out: uint32[k]. Any content is safe. To work in:
    bitmap: uint64, of at least (domain + history * width) // 64 + 3; classes: uint64, of at least domain // 64 + 2 * counts.size,
    where `domain` is the sum of the domains.
    """
    starts, at, word = np.empty(counts.size, np.int64), np.int64(0), np.int64(0)
    classes[:] = _0
    for h in range(counts.size):  # each class has a bitmap of its own
        starts[h] = word << 6
        for i in range(at, at + counts[h]):
            if np.int64(positions[i]) >= domains[h]:
                return False
            classes[word + np.int64(positions[i] >> 6)] |= _1 << np.uint64(positions[i] & 63)
        at += counts[h]
        word += (domains[h] >> 6) + 2
    before = (history * width + 63) >> 6 << 6  # bits in front of those of the table
    step = min(64, width)  # elements whose rows above are known
    bitmap[:] = _0
    above, masks = np.empty(history, np.uint64), np.empty(counts.size, np.uint64)
    seen, k = np.zeros(counts.size, np.int64), np.int64(0)
    for start in range(0, domain, step):
        _split_elements(bitmap, before + start, width, ~_0 >> np.uint64(64 - min(step, domain - start)), above, masks)
        found, over = _0, False
        for h in range(counts.size):
            found |= spread(_bits_at(classes, starts[h] + seen[h]), masks[h])
            seen[h] += np.int64(popcount(masks[h]))
            over |= seen[h] > domains[h]
        if over:
            return False
        at, shift = (before + start) >> 6, np.uint64(start & 63)
        bitmap[at] |= found << shift
        bitmap[at + 1] |= (found >> _1) >> (_63 - shift)
        while found != _0:
            out[k] = np.uint32(start + np.int64(trailing_zeros(found)))
            k += 1
            found &= found - _1
    good = k == positions.size
    for h in range(counts.size):
        good &= seen[h] == domains[h]
    return good
