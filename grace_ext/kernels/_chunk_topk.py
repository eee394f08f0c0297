"""The largest magnitudes of a chunk: for kernels/chunks.py and kernels/dct.py."""

import numpy as np

from ._helpers import MAGNITUDE, largest_magnitude
from ._intrinsics import HAS_COMPRESS, LANES, bits_of, collect16, float_of, helper, mask16, trailing_zeros

GROUPS = 16 * LANES  # of a chunk: those values whose places in it are the same modulo GROUPS
_1 = np.uint32(1)


@helper
def _reached(magnitudes, k, most):
    """Return a magnitude that k of uint32[n] reach, 1 <= k <= n, or a few more, up to `most`; by bisection of the bits.

    Where ties leave no such magnitude, the k-th largest is returned.
    """
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
            if reached <= most:
                break
        else:
            high = np.uint32(middle - _1)
    return low


@helper
def _bound(part, take, groups):
    """Return a magnitude that at least `take` values of float32[n] reach, and not many more where they are spread evenly.

    About so many of the groups' largest magnitudes reach it. It is 0 if there are fewer groups. groups: uint32[GROUPS], to work in.
    """
    if take > GROUPS or part.size < 2 * GROUPS:
        return np.uint32(0)
    groups[:] = np.uint32(0)
    for start in range(0, part.size, GROUPS):
        row = part[start : start + GROUPS]
        for i in range(row.size):
            magnitude = np.uint32(bits_of(row[i]) & MAGNITUDE)
            groups[i] = magnitude if magnitude > groups[i] else groups[i]
    return _reached(groups, take, take + take // 8)


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


@helper
def select_of_chunk(part, start, k, groups, work, positions, found, n):
    """Append the k largest magnitudes of a chunk to positions[n:] and found[n:]; returns where they end.

    part: float32[m], the chunk, which begins at position `start`; all of it is selected if m < k. groups: uint32[GROUPS] and
    work: uint32[3, m + LANES], to work in. Otherwise as chunks.select_chunks.
    """
    places, bits, magnitudes = work[0], work[1], work[2]
    take = min(k, part.size)
    bound = _bound(part, take, groups)
    if bound == 0 and largest_magnitude(part) == 0:
        for c in range(take):
            positions[n + c], found[n + c] = np.uint32(start + c), part[c]
        return n + take
    count = _collect(part, bound, places, bits)
    for c in range(count):
        magnitudes[c] = np.uint32(bits[c] & MAGNITUDE)
    least, larger = _reached(magnitudes[:count], take, take), 0
    for c in range(count):
        larger += np.int64(magnitudes[c] > least)
    ties, kept = take - larger, 0
    for c in range(count):
        tie = np.int64(magnitudes[c] == least) & np.int64(ties > 0)
        places[kept], bits[kept] = places[c], bits[c]
        kept += np.int64(magnitudes[c] > least) | tie
        ties -= tie
    for c in range(kept):
        positions[n + c], found[n + c] = np.uint32(start + places[c]), float_of(bits[c])
    return n + kept
