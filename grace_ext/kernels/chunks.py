"""The largest magnitudes of every chunk."""

import numpy as np

from ._compile import kernel
from ._helpers import MAGNITUDE
from ._intrinsics import HAS_COMPRESS, LANES, bits_of, collect16, helper, mask16, trailing_zeros

GROUPS = 16 * LANES  # of a chunk: those values whose places in it are the same modulo GROUPS
_1 = np.uint32(1)


@helper
def _kth_largest(magnitudes, k):
    """Return the k-th largest of uint32[n], 1 <= k <= n, by bisection of the bits."""
    low, high = np.uint32(0), np.uint32(0)
    for i in range(magnitudes.size):
        high = magnitudes[i] if magnitudes[i] > high else high
    while low < high:
        middle = np.uint32(low + np.uint32(np.uint32(high - low + _1) >> _1))
        reached = np.uint32(0)
        for i in range(magnitudes.size):
            reached += _1 if magnitudes[i] >= middle else np.uint32(0)
        if reached >= k:
            low = middle
        else:
            high = np.uint32(middle - _1)
    return low


@helper
def _bound(part, take, groups):
    """Return a magnitude that at least `take` values of float32[n] reach, and not many more where they are spread evenly.

    It is the take-th largest of the groups' largest magnitudes, 0 if there are fewer groups. groups: uint32[GROUPS], to work in.
    """
    if take > GROUPS or part.size < 2 * GROUPS:
        return np.uint32(0)
    groups[:] = np.uint32(0)
    for start in range(0, part.size, GROUPS):
        row = part[start : start + GROUPS]
        for i in range(row.size):
            magnitude = np.uint32(bits_of(row[i]) & MAGNITUDE)
            groups[i] = magnitude if magnitude > groups[i] else groups[i]
    return _kth_largest(groups, take)


@helper
def _collect(part, bound, positions, found):
    """Write the places and bits of magnitudes from `bound` on; returns how many. positions, found: uint32[n + LANES]."""
    count, whole = np.int64(0), part.size // LANES * LANES
    for i in range(0, whole, LANES):
        if HAS_COMPRESS:
            count += collect16(part, part, part, i, bound, positions, found, count)
        else:
            mask = mask16(part, part, part, i, bound)
            while mask != 0:
                at = i + np.int64(trailing_zeros(mask))
                positions[count], found[count] = np.uint32(at), bits_of(part[at])
                count += 1
                mask &= mask - np.uint64(1)
    for i in range(whole, part.size):
        positions[count], found[count] = np.uint32(i), bits_of(part[i])
        count += np.int64((bits_of(part[i]) & MAGNITUDE) >= bound)
    return count


@kernel("int64(Array(float32, 1, 'C', readonly=True), int64, int64, uint32[::1], float32[::1], uint32[:, ::1])")
def select_chunks(values, chunk, k, positions, found, work):
    """Select the k largest magnitudes of every `chunk` values; returns how many are selected in all.

    Of each chunk exactly k are selected (all of a shorter last one); ties go to the lowest position. values: float32[d];
    positions: uint32[n] and found: float32[n], written, n = k for every chunk. work: uint32[3, chunk + LANES].
    """
    n, groups = 0, np.empty(GROUPS, np.uint32)
    places, bits, magnitudes = work[0], work[1], work[2]
    for start in range(0, values.size, chunk):
        part = values[start : min(values.size, start + chunk)]
        take = min(k, part.size)
        count = _collect(part, _bound(part, take, groups), places, bits)
        for c in range(count):
            magnitudes[c] = np.uint32(bits[c] & MAGNITUDE)
        least = _kth_largest(magnitudes[:count], take)
        ties = take
        for c in range(count):
            ties -= np.int64(magnitudes[c] > least)
        for c in range(count):
            if magnitudes[c] > least or (magnitudes[c] == least and ties > 0):
                ties -= np.int64(magnitudes[c] == least)
                positions[n] = np.uint32(start + places[c])
                found[n] = part[places[c]]
                n += 1
    return n
