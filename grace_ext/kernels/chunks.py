"""The largest magnitudes of every chunk."""

import numpy as np

from ._compile import kernel
from ._helpers import MAGNITUDE
from ._intrinsics import bits_of

BINS = 2048  # one for each value of the upper 11 bits of a magnitude: its exponent and 3 bits of the fraction


@kernel("int64(Array(float32, 1, 'C', readonly=True), int64, int64, uint32[::1], float32[::1], uint32[::1], int64[::1])")
def select_chunks(values, chunk, k, positions, found, candidates, histogram):
    """Select the k largest magnitudes of every `chunk` values; returns how many are selected in all.

    Of each chunk exactly k are selected (all of a shorter last one); ties go to the lowest position. values: float32[d];
    positions: uint32[n] and found: float32[n], written, n = k for every chunk. candidates: uint32[chunk + 1] and histogram:
    int64[BINS], to work in.
    """
    n = 0
    for start in range(0, values.size, chunk):
        size = min(chunk, values.size - start)
        part = values[start : start + size]
        take = min(k, size)
        histogram[:] = 0
        for i in range(size):
            histogram[(bits_of(part[i]) & MAGNITUDE) >> np.uint32(20)] += 1
        bin_, above = BINS - 1, 0
        while above + histogram[bin_] < take:
            above += histogram[bin_]
            bin_ -= 1
        # The wanted bound lies in this bin: the smallest magnitude of which at most `take` are at least as large, or the
        # one that ties share.
        low, high = np.uint32(bin_ << 20), np.uint32((bin_ << 20) | 0xFFFFF)
        count = 0
        for i in range(size):
            candidates[count] = np.uint32(i)
            count += np.int64((bits_of(part[i]) & MAGNITUDE) >= low)
        while low < high:
            middle = np.uint32(low + ((high - low + np.uint32(1)) >> np.uint32(1)))
            reached = 0
            for c in range(count):
                reached += np.int64((bits_of(part[candidates[c]]) & MAGNITUDE) >= middle)
            if reached >= take:
                low = middle
            else:
                high = np.uint32(middle - np.uint32(1))
        ties = take
        for c in range(count):
            ties -= np.int64((bits_of(part[candidates[c]]) & MAGNITUDE) > low)
        for c in range(count):
            i = candidates[c]
            magnitude = bits_of(part[i]) & MAGNITUDE
            if magnitude > low or (magnitude == low and ties > 0):
                ties -= np.int64(magnitude == low)
                positions[n] = np.uint32(start + i)
                found[n] = part[i]
                n += 1
    return n
