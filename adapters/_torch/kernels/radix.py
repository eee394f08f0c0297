"""The magnitude of a rank, found by histograms of some of the bits, the highest first. Part of the selection in topk.py.

A histogram has several rows in global memory (see count_in_rows). One for each program would take 8 KiB of shared memory and many
registers.
"""

import triton
import triton.language as tl

from ._helpers import MAGNITUDE, NON_FINITE, ROWS, count_in_rows
from ._launch import blocks, launch

BINS = 2048
SIZE = ROWS * BINS  # of a histogram
BLOCK = 1024
_MOST_PROGRAMS = 128
ROUNDS = ((20, 11), (9, 11), (0, 9))  # shift and width of the bits that each round finds
# Of a selection, int32[4]: the bits found so far of the magnitude of a rank, how many are strictly larger, whether any is not
# finite, and how many there are to select from.
BOUND, LARGER, SPECIAL, COUNT = (tl.constexpr(i) for i in range(4))
_BINS, _ROWS = tl.constexpr(BINS), tl.constexpr(ROWS)


@triton.jit
def radix_histogram(bits, state, histogram, room, SHIFT: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """Count the next WIDTH bits of those magnitudes that agree with what the rounds before have found; see count_in_rows."""
    n = tl.minimum(tl.load(state + COUNT), room)
    found = tl.load(state + BOUND).to(tl.uint32)
    for start in range(tl.program_id(0).to(tl.int64) * BLOCK, n, tl.num_programs(0) * BLOCK):
        at = start + tl.arange(0, BLOCK)
        inside = at < n
        x = tl.load(bits + at, mask=inside, other=0).to(tl.uint32, bitcast=True) & MAGNITUDE
        agrees = inside & ((x >> (SHIFT + WIDTH - 1)) >> 1 == (found >> (SHIFT + WIDTH - 1)) >> 1)
        bin_ = ((x >> SHIFT) & ((1 << WIDTH) - 1)).to(tl.int32)
        count_in_rows(histogram, bin_, at, agrees, _BINS)


@triton.jit
def radix_find(state, histogram, rank, room, SHIFT: tl.constexpr):
    """Find the bin of the rank-th largest magnitude (1-based; at most as many as there are), and clear all rows."""
    rank = tl.minimum(rank, tl.minimum(tl.load(state + COUNT), room))
    larger, bound = tl.load(state + LARGER), tl.load(state + BOUND)
    bins = tl.arange(0, _BINS)
    count = tl.zeros([_BINS], tl.int32)
    for row in tl.static_range(_ROWS):
        count += tl.load(histogram + row * _BINS + bins)
    from_here_on = tl.sum(count) - tl.cumsum(count) + count
    found = tl.max(tl.where(larger + from_here_on >= rank, bins, 0))
    above = tl.sum(tl.where(bins > found, count, 0))
    special = tl.sum(tl.where(bins >= (NON_FINITE >> 20), count, 0))
    tl.debug_barrier()  # all warps have read what is written now
    for row in tl.static_range(_ROWS):
        tl.store(histogram + row * _BINS + bins, tl.zeros([_BINS], tl.int32))
    tl.store(state + LARGER, larger + above)
    tl.store(state + BOUND, bound | (found << SHIFT))
    if SHIFT == 20:
        tl.store(state + SPECIAL, special)


def programs_of(room: int) -> int:
    """The number of programs that count up to `room` elements."""
    return min(blocks(room, BLOCK), _MOST_PROGRAMS)


def select(histogram, bits, state, room: int, rank: int, rounds) -> None:
    """Find the rank-th largest magnitude of bits, int32[at most room]. histogram: int32[SIZE], zeros, and zeros afterwards."""
    for shift, width in rounds:
        programs = programs_of(room)
        launch(radix_histogram, programs, bits, state, histogram, room, SHIFT=shift, WIDTH=width, BLOCK=BLOCK)
        launch(radix_find, 1, state, histogram, rank, room, SHIFT=shift)
