"""Exact selection of the k largest magnitudes, in about one pass over the tensor.

A sample of cache lines gives two bounds that bracket the k-th largest magnitude. One pass collects every element above the lower
one, and the few candidates between them are then selected exactly. Where the sample misleads (too few or too many candidates),
histograms of the whole tensor take its place: the result is always exact. Magnitudes are compared as the floats' bits without
the sign: that order is theirs, with NaN and Inf above all others.
"""

import numpy as np

from ._compile import kernel
from ._helpers import MAGNITUDE, STREAMED
from ._intrinsics import (
    HAS_COMPRESS,
    add16,
    add_collect16,
    add_mask16,
    bits_of,
    collect16,
    helper,
    mask16,
    stream_collect16,
    stream_mask16,
    trailing_zeros,
)
from ._ranks import bounds, find_bin, kth_largest, refine, sample_lines
from ._sums import SKETCH_ROOM, add_sketch, end_sketch

_NO_SUMS = np.empty(0, np.float32)
BLOCK = 4096  # elements between two checks of the candidate room
SLACK = BLOCK + 16
_MAX_LINES = 4096  # sampled cache lines of 16 floats
_STRIDE = 16  # of dgc's lines, every 16th gives a first bound


def candidate_room(d: int, k: int) -> int:
    """Return how many candidates the scratch arrays must hold for d elements. A good sample never gives more."""
    return min(d, 2 * k + 65536) + SLACK


def sample_room(d: int) -> int:
    """Return the number of elements of the scratch array for the sample."""
    return 16 * min(max(d // 1024, 64), _MAX_LINES)


@helper
def _collect_block(gradient, residual, out, fused, streamed, start, stop, bound, positions, found, j):
    """Add (if fused) and collect one block. The vector part is 16 wide on every CPU; LLVM splits it where necessary."""
    vector_end = start + (stop - start) // 16 * 16
    if HAS_COMPRESS:
        if streamed:
            for i in range(start, vector_end, 16):
                j += stream_collect16(gradient, residual, out, i, bound, positions, found, j)
        elif fused:
            for i in range(start, vector_end, 16):
                j += add_collect16(gradient, residual, out, i, bound, positions, found, j)
        else:
            for i in range(start, vector_end, 16):
                j += collect16(gradient, residual, out, i, bound, positions, found, j)
    else:
        for i in range(start, vector_end, 16):
            if streamed:
                mask = stream_mask16(gradient, residual, out, i, bound)
            elif fused:
                mask = add_mask16(gradient, residual, out, i, bound)
            else:
                mask = mask16(gradient, residual, out, i, bound)
            while mask != 0:
                at = i + np.int64(trailing_zeros(mask))
                positions[j] = np.uint32(at)
                if streamed:  # then out[at] is in no cache any more
                    found[j] = bits_of(np.float32(gradient[at] + residual[at]))
                else:
                    found[j] = bits_of(out[at] if fused else gradient[at])
                j += 1
                mask &= mask - np.uint64(1)
    for i in range(vector_end, stop):
        x = gradient[i]
        if fused:
            x = np.float32(x + residual[i])
            out[i] = x
        u = bits_of(x)
        positions[j] = np.uint32(i)
        found[j] = u
        j += np.int64((u & MAGNITUDE) >= bound)
    return j


@helper
def _scan(gradient, residual, out, fused, bound, positions, found, sketched=False, low=0, high=0, sums=_NO_SUMS):
    """Set out = gradient + residual if fused, and collect the elements with magnitude >= bound.

    Returns how many, or -1 if there are more than room (out is complete all the same). If sketched, each block of the gradient is
    added to the sums of a sketch before `out` is written, as second_moment.random_sketch does with the key (low, high).
    """
    d, room, j = gradient.size, positions.size - SLACK, 0
    is_apart = out.ctypes.data != gradient.ctypes.data and out.ctypes.data != residual.ctypes.data
    streamed = fused and d >= STREAMED and is_apart and out.ctypes.data & 63 == 0
    for start in range(0, d, BLOCK):
        stop = min(d, start + BLOCK)
        if sketched:
            add_sketch(gradient, start, stop, low, high, sums)
        if j > room and fused:
            for i in range(start, stop):
                out[i] = gradient[i] + residual[i]
        elif j > room:
            return -1
        else:
            j = _collect_block(gradient, residual, out, fused, streamed, start, stop, bound, positions, found, j)
    return j if j <= room else -1


@helper
def _shift(positions, n, start):
    """Add `start` to positions[:n], if n is positive, and return n."""
    for i in range(n):
        positions[i] += np.uint32(start)
    return n


@helper
def _keep_exact(positions, found, n, bound, ties):
    """Keep, in place and in order, the magnitudes above `bound` and the first `ties` equal to it. Returns the count."""
    j = 0
    for i in range(n):
        u, at = found[i], positions[i]
        x = np.uint32(u & MAGNITUDE)
        keep = x > bound
        if x == bound and ties > 0:
            ties -= 1
            keep = True
        positions[j] = at
        found[j] = u
        j += np.int64(keep)
    return j


@helper
def _from_histograms(bits, k, positions, found, histogram):
    """The slow exact path: no candidate list, three passes for histograms and one to collect. Never selects a zero."""
    bound, larger = kth_largest(bits, bits.size, k, histogram)
    ties = k - larger if bound > 0 else 0
    j = 0
    for i in range(bits.size):
        u = bits[i]
        x = np.uint32(u & MAGNITUDE)
        if x > bound or (x == bound and ties > 0):
            if x == bound:
                ties -= 1
            positions[j] = np.uint32(i)
            found[j] = u
            j += 1
    return j


@helper
def _choose(bits, k, lower, upper, positions, found, count, band, histogram):
    """Select among candidates; see `choose_topk`."""
    if 0 <= count <= k and (count == k or lower == 1):
        return count
    # Select only among the candidates in the band [lower, upper); those from upper on are all selected, if fewer than k.
    in_band = 0
    for i in range(max(count, 0)):
        x = np.uint32(found[i] & MAGNITUDE)
        band[in_band] = x
        in_band += np.int64(x < upper)
    certain = count - in_band
    if count < k or certain >= k:
        if count >= k:  # the sample's upper bound was too low, but the candidates are complete
            bound, larger = kth_largest(found, count, k, histogram)
            return _keep_exact(positions, found, count, bound, k - larger)
        return _from_histograms(bits, k, positions, found, histogram)
    bound, larger = kth_largest(band, in_band, k - certain, histogram)
    return _keep_exact(positions, found, count, bound, k - certain - larger)


@kernel(
    "int64(Array(float32, 1, 'C', readonly=True), Array(float32, 1, 'C', readonly=True), float32[::1], boolean,"
    " int64, uint32[::1], uint32[::1], uint32[::1], uint32[::1], int64[::1])"
)
def select_topk(gradient, residual, out, fused, k, positions, found, band, sample, histogram):
    """Select the k largest magnitudes of `gradient + residual` (written to `out`) or, if not fused, of `gradient`.

    gradient, residual, out: float32[d]; 1 <= k <= d. If not fused, residual and out are ignored. positions, found:
    uint32[candidate_room(d, k)]; band: as long. sample: uint32[sample_room(d)]; histogram: int64[BINS]. Returns the number n
    of selected elements, at most k: exact zeros are never selected; ties go to the lowest index. positions[:n] is ascending,
    found[:n] holds the bits of the floats. If any element is not finite, found[:n] holds such a one.
    """
    n = sample_lines(gradient, residual, fused, sample)
    lower, upper = bounds(sample, n, k, gradient.size, histogram)
    count = _scan(gradient, residual, out, fused, lower, positions, found)
    bits = (out if fused else gradient).view(np.uint32)
    return _choose(bits, k, lower, upper, positions, found, count, band, histogram)


@kernel("int64(Array(float32, 1, 'C', readonly=True), Array(float32, 1, 'C', readonly=True), uint32[::1])")
def sample_sum(gradient, residual, sample):
    """Write the bits of some elements of gradient + residual to `sample`, uint32[16 n]; returns how many. Both float32[d]."""
    return sample_lines(gradient, residual, True, sample)


@helper
def _gather(gradient, residual, fused, lines, sample):
    """Write the bits of some lines of gradient + residual, or of the gradient, to `sample`. Returns how many.

    There is one store for each line and nothing else in the loop, so that the processor waits for many lines at once.
    """
    values, other = sample.view(np.float32), residual if fused else gradient
    for i in range(lines.size):
        start = 16 * np.int64(lines[i])
        add16(gradient, start, other, start if fused else -1, values, 16 * i)
    return 16 * lines.size


@kernel(
    "uint32(Array(float32, 1, 'C', readonly=True), Array(float32, 1, 'C', readonly=True), boolean,"
    " Array(uint32, 1, 'C', readonly=True), int64, uint32[::1], int64[::1])"
)
def sampled_bound(gradient, residual, fused, lines, rank, sample, histogram):
    """Return the rank-th largest magnitude (1-based) in some lines of 16 elements, without its last 9 bits, and at least 1.

    gradient, residual: float32[d]; their sum is looked at if fused, else the gradient. lines: uint32[n], below d // 16; 1 <=
    rank <= 16 n; sample: uint32[32 n], to work in; histogram: int64[BINS].
    """
    n = _gather(gradient, residual, fused, lines[::_STRIDE], sample)
    low, _ = bounds(sample, n, rank, 16 * lines.size, histogram)
    n = _gather(gradient, residual, fused, lines, sample)
    values, large, reached = sample.view(np.float32), sample[n:], 0
    for i in range(0, n, 16):
        mask = mask16(values, values, values, i, low)
        while mask != 0:
            large[reached] = sample[i + np.int64(trailing_zeros(mask))]
            reached += 1
            mask &= mask - np.uint64(1)
    if reached >= rank:  # else the first lines misled
        sample, n = large, reached
    histogram[:] = 0
    for i in range(n):
        histogram[(sample[i] & MAGNITUDE) >> np.uint32(20)] += 1
    bin_, above = find_bin(histogram, rank)
    return max(np.uint32(1), refine(sample, n, bin_, rank - above, histogram))


@kernel("UniTuple(uint32, 2)(uint32[::1], int64, int64, int64, int64[::1])")
def topk_bounds(sample, n, k, d, histogram):
    """Return magnitudes that bracket the k-th largest of d elements, of which the bits of n are in `sample`.

    sample: uint32[m], n <= m; 1 <= k <= d; histogram: int64[BINS].
    """
    return bounds(sample, n, k, d, histogram)


@kernel(
    "int64(Array(float32, 1, 'C', readonly=True), Array(float32, 1, 'C', readonly=True), float32[::1], int64, uint32,"
    " uint32[::1], uint32[::1])"
)
def add_and_collect(gradient, residual, out, start, bound, positions, found):
    """Set out = gradient + residual, and collect the positions from `start` on, and bits, of magnitudes from `bound` on.

    gradient, residual, out: float32[d], start + d < 2**32. positions, found: uint32[n], n >= SLACK. Returns how many were
    collected; -1 if there are more than n - SLACK, and out is complete all the same.
    """
    return _shift(positions, _scan(gradient, residual, out, True, bound, positions, found), start)


@kernel(
    "int64(Array(float32, 1, 'C', readonly=True), Array(float32, 1, 'C', readonly=True), float32[::1], int64, uint32,"
    " uint32[::1], uint32[::1], uint32, uint32, float32[::1])"
)
def sketch_and_collect(gradient, residual, out, start, bound, positions, found, low, high, sketch):
    """Like `add_and_collect`, and sketch (float32[8]) = what second_moment.random_sketch writes for the gradient."""
    sums = np.zeros(SKETCH_ROOM, np.float32)
    n = _scan(gradient, residual, out, True, bound, positions, found, True, low, high, sums)
    end_sketch(sums, gradient.size, sketch)
    return _shift(positions, n, start)


@kernel(
    "int64(Array(uint32, 1, 'C', readonly=True), int64, uint32, uint32, uint32[::1], uint32[::1], int64, uint32[::1],"
    " int64[::1])"
)
def choose_topk(bits, k, lower, upper, positions, found, count, band, histogram):
    """Select the k largest magnitudes of uint32[d], as `select_topk` does, after the candidates have been collected.

    lower, upper: what `topk_bounds` returned. positions[:count], found[:count]: all magnitudes from `lower` on, by ascending
    position; count = -1 if there was no room for them. For the rest see `select_topk`.
    """
    return _choose(bits, k, lower, upper, positions, found, count, band, histogram)


@kernel(
    "int64(Array(float32, 1, 'C', readonly=True), Array(float32, 1, 'C', readonly=True), float32[::1], boolean,"
    " uint32, uint32[::1], uint32[::1])"
)
def select_above(gradient, residual, out, fused, bound, positions, found):
    """Select the magnitudes whose bits are at least `bound`, of `gradient + residual` (written to `out`) or of `gradient`.

    gradient, residual, out: float32[d]. If not fused, residual and out are ignored. positions, found: uint32[d + SLACK].
    Returns the number n of selected elements; positions[:n] is ascending, found[:n] holds the bits of the floats.
    """
    return _scan(gradient, residual, out, fused, bound, positions, found)
