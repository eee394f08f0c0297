"""Quantile buckets: a histogram, cut into parts of equal count, and the mean of each. The counterpart of grace_ext/kernels/sketch.py.

The host adds up the values of a bucket in their order, at odd and at even places apart, so here they are sorted by that, and a lane
adds up each of these lists.
"""

import torch
import triton
import triton.language as tl

from grace_ext.kernels.sketch import MOST_BINS

from ._helpers import bits_of, block_offsets, magnitude_of
from ._launch import blocks, launch
from .natural import NOTHING, find_range

BLOCK = 1024
LANES = 32  # buckets of a program that adds up
UNROLLED = 16
BUCKETS = 256
_OCTAVES = tl.constexpr(32 << 23)  # magnitudes below 2**-32 of the largest are in the same bin as those just above


@triton.jit
def _bin_of(x, found, bins):
    """The bin of each value: negative ones below `bins`, zeros in it, positive ones above. found: what nonzero_range gave."""
    smallest, largest = tl.load(found), tl.load(found + 1)
    smallest = tl.where(smallest == NOTHING, 0, smallest + 1)
    floor = tl.where(largest > _OCTAVES, tl.maximum(smallest, largest - _OCTAVES), smallest)
    shift = tl.zeros([], tl.int32)
    for i in tl.static_range(31):
        shift += (((largest - floor) >> i) >= bins).to(tl.int32)
    magnitude = magnitude_of(x).to(tl.int32)
    away = tl.where(magnitude > 0, (tl.maximum(magnitude - floor, 0) >> shift) + 1, 0)
    return tl.where(bits_of(x) >= 0x80000000, bins - away, bins + away)


@triton.jit
def count_bins(values, found, counts, n, bins, BLOCK: tl.constexpr):
    """Add the numbers of float32[n] in each bin to counts, int32[2 * bins + 1]."""
    at = block_offsets(BLOCK)
    inside = at < n
    x = tl.load(values + at, mask=inside, other=0.0)
    tl.atomic_add(counts + _bin_of(x, found, bins), 1, mask=inside, sem="relaxed")


@triton.jit
def _sum_of(counts, first, last, BLOCK: tl.constexpr):
    total = tl.zeros([BLOCK], tl.int32)
    for start in range(first, last, BLOCK):
        at = start + tl.arange(0, BLOCK)
        total += tl.load(counts + at, mask=at < last, other=0)
    return tl.sum(total)


@triton.jit
def _cut(counts, lookup, sizes, first, last, left, parts, level, BLOCK: tl.constexpr):
    """Cut the bins first..last - 1, of `left` values, into at most `parts` levels of equal count; returns the next level.

    A level goes up to a bin at which it, or the bin, has its share; those between levels are searched a block at a time.
    """
    start = tl.zeros([], tl.int32) + first
    while start < last:
        share = (left.to(tl.int64) + parts - 1) // tl.maximum(parts, 1)
        held = tl.zeros([], tl.int32)
        end = tl.zeros([], tl.int32) + last
        at_block = start
        while at_block < end:
            at = at_block + tl.arange(0, BLOCK)
            count = tl.load(counts + at, mask=at < end, other=0)
            before = held + tl.cumsum(count) - count
            full = (count > 0) & (before > 0) & ((before >= share) | (count >= share)) & (parts > 1)
            end = tl.minimum(end, tl.min(tl.where(full, at, 0x7FFFFFFF)))
            held += tl.sum(tl.where(at < end, count, 0))
            tl.store(lookup + at, (tl.zeros([BLOCK], tl.int32) + level).to(tl.uint8), mask=at < end)
            at_block += BLOCK
        tl.store(sizes + level, held, mask=held > 0)
        left -= held
        level += (held > 0).to(tl.int32)
        parts -= (held > 0).to(tl.int32)
        start = end
    return level


@triton.jit
def cut_bins(counts, lookup, sizes, used, bins, most, BLOCK: tl.constexpr):
    """Give each bin a level, none with both signs and zeros with one of their own.

    counts: int32[2 * bins + 1]; lookup: uint8 of as many, the level of each bin; sizes: int32[256], the values of each level;
    used: int32[1], how many levels there are, at most `most`.
    """
    zeros = tl.load(counts + bins)
    negative = _sum_of(counts, 0, bins, BLOCK)
    positive = _sum_of(counts, bins + 1, 2 * bins + 1, BLOCK)
    parts = most - (zeros > 0).to(tl.int32)
    both = negative.to(tl.int64) + positive
    below = ((2 * parts * negative.to(tl.int64) + both) // tl.maximum(2 * both, 1)).to(tl.int32)
    below = tl.minimum(tl.maximum(below, 1), parts - (positive > 0).to(tl.int32))
    below = tl.where(negative > 0, below, 0)
    level = tl.zeros([], tl.int32)
    level = _cut(counts, lookup, sizes, 0, tl.where(negative > 0, bins, 0), negative, below, level, BLOCK)
    tl.store(lookup + bins, level.to(tl.uint8), mask=zeros > 0)
    tl.store(sizes + level, zeros, mask=zeros > 0)
    level += (zeros > 0).to(tl.int32)
    last = tl.where(positive > 0, 2 * bins + 1, bins + 1)
    level = _cut(counts, lookup, sizes, bins + 1, last, positive, parts - below, level, BLOCK)
    tl.store(used, level)


@triton.jit
def assign_levels(values, found, lookup, levels, lists, n, bins, BLOCK: tl.constexpr):
    """levels, uint8[n]: those of float32[n]; lists, int16[n]: twice that, and 1 more at odd places."""
    at = block_offsets(BLOCK)
    inside = at < n
    x = tl.load(values + at, mask=inside, other=0.0)
    level = tl.load(lookup + _bin_of(x, found, bins), mask=inside, other=0)
    tl.store(levels + at, level, mask=inside)
    tl.store(lists + at, (2 * level.to(tl.int32) + (at & 1).to(tl.int32)).to(tl.int16), mask=inside)


@triton.jit
def mean_of_lists(values, starts, sizes, table, LANES: tl.constexpr, UNROLLED: tl.constexpr):
    """table, float32[256]: the mean of each level's values.

    values: float32[n], sorted by their list; starts, int64[513]: where each list begins, and n; sizes: int32[256]. A list is
    added up in its order.
    """
    level = tl.program_id(0) * LANES + tl.arange(0, LANES)
    total = tl.zeros([LANES], tl.float64)
    for odd in tl.static_range(2):
        start, end = tl.load(starts + 2 * level + odd), tl.load(starts + 2 * level + odd + 1)
        sums = tl.zeros([LANES], tl.float64)
        for first in range(0, tl.max(end - start), UNROLLED):
            for row in tl.static_range(UNROLLED):
                at = start + first + row
                sums += tl.load(values + at, mask=at < end, other=0.0).to(tl.float64)
        total += sums
    size = tl.load(sizes + level)
    mean = total / tl.maximum(size, 1).to(tl.float64)
    tl.store(table + level, tl.where(size > 0, mean, 0.0).to(tl.float32))


def encode(source, found, most: int, table, used, special):
    """The levels of float32[n], uint8[n], and the source of the same values without a residual, which has been added.

    source: a device_values.Source; found: int32[2]; most: levels, 4 to 256; table: float32[256] and used: int32[1], written: their
    means, and how many there are.
    """
    source = find_range(source, found, special)
    values, device, n = source.values, source.values.device, source.values.numel()
    bins = min(MOST_BINS, max(1024, 1 << n.bit_length() >> 2))
    counts = torch.zeros(2 * bins + 1, dtype=torch.int32, device=device)
    lookup = torch.zeros(2 * bins + 1, dtype=torch.uint8, device=device)
    sizes = torch.zeros(BUCKETS, dtype=torch.int32, device=device)
    levels = torch.empty(n, dtype=torch.uint8, device=device)
    lists = torch.empty(n, dtype=torch.int16, device=device)
    launch(count_bins, blocks(n, BLOCK), values, found, counts, n, bins, BLOCK=BLOCK)
    launch(cut_bins, 1, counts, lookup, sizes, used, bins, most, BLOCK=BLOCK)
    launch(assign_levels, blocks(n, BLOCK), values, found, lookup, levels, lists, n, bins, BLOCK=BLOCK)
    ordered, order = torch.sort(lists, stable=True)
    starts = torch.searchsorted(ordered, torch.arange(2 * BUCKETS + 1, dtype=torch.int16, device=device))
    launch(
        mean_of_lists, BUCKETS // LANES, values[order], starts, sizes, table, LANES=LANES, UNROLLED=UNROLLED, num_warps=1
    )  # fmt: skip
    return levels, source
