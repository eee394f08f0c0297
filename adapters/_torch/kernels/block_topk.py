"""Exact selection of the largest magnitudes in each block of a gradient. The counterpart of grace_ext/kernels/chunks.py."""

import functools

import numpy as np
import torch
import triton
import triton.language as tl

from grace_ext.sparsifiers.topk import TopK

from ..mailbox import to_device
from ._helpers import NON_FINITE, bits_of, magnitude_of
from ._launch import launch
from .topk import Selection

MOST_ELEMENTS = 4096  # of a block, which a program keeps in registers


@triton.jit
def select_in_blocks(
    gradient, residual, out, starts, sizes, ranks, firsts, positions, bits, counts, special,
    FUSED: tl.constexpr, ZEROS: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """out = gradient + residual if FUSED (out may be one of both), and select the largest magnitudes of each block.

    Program i has sizes[i] elements from starts[i] on, selects ranks[i] of them, ties by the lowest index and a zero only if ZEROS, writes
    them from firsts[i] on in ascending order, and their number to counts[i]. special: int32[1], other than 0 afterwards if one
    of all elements is not finite. The bound is found bit by bit.
    """
    block = tl.program_id(0)
    start, size, rank = tl.load(starts + block), tl.load(sizes + block), tl.load(ranks + block)
    lane = tl.arange(0, BLOCK)
    inside = lane < size
    x = tl.load(gradient + start + lane, mask=inside, other=0.0)
    if FUSED:
        x += tl.load(residual + start + lane, mask=inside, other=0.0)
        tl.store(out + start + lane, x, mask=inside)
    magnitude = magnitude_of(x).to(tl.int32)
    largest = tl.max(magnitude)
    tl.atomic_max(special, largest, mask=largest >= NON_FINITE, sem="relaxed")
    bound = tl.zeros([], tl.int32)
    for bit in tl.static_range(31):
        trial = bound | (1 << (30 - bit))
        bound = tl.where(tl.sum((magnitude >= trial).to(tl.int32)) >= rank, trial, bound)
    above = (magnitude > bound).to(tl.int32)
    if ZEROS:
        tie = (inside & (magnitude == bound)).to(tl.int32)
    else:
        tie = ((magnitude == bound) & (bound > 0)).to(tl.int32)
    kept = above | (tie & (tl.cumsum(tie) - tie < rank - tl.sum(above)).to(tl.int32))
    place = tl.load(firsts + block) + tl.cumsum(kept) - kept
    tl.store(positions + place, (start + lane).to(tl.int32), mask=kept > 0)
    tl.store(bits + place, bits_of(x).to(tl.int32, bitcast=True), mask=kept > 0)
    tl.store(counts + block, tl.sum(kept))


@triton.jit
def join_blocks(positions, bits, firsts, counts, ends, out_positions, out_bits, BLOCK: tl.constexpr):
    """Copy what each block has selected to where the selections of all blocks lie one after the other. ends: sums of counts."""
    block = tl.program_id(0)
    first, n = tl.load(firsts + block), tl.load(counts + block)
    to = tl.load(ends + block) - n
    for start in range(0, n, BLOCK):
        at = start + tl.arange(0, BLOCK)
        inside = at < n
        tl.store(out_positions + to + at, tl.load(positions + first + at, mask=inside, other=0), mask=inside)
        tl.store(out_bits + to + at, tl.load(bits + first + at, mask=inside, other=0), mask=inside)


def select_of_blocks(gradient, residual, out, sizes: tuple[int, ...], sparsifier: TopK, chunk: int = 0) -> Selection:
    """Select the sparsifier's share of the elements of each block, which are fewer at the end of a tensor.

    gradient, out: float32[d], which may be the same; residual: float32[d], or None: then `out` is not written. sizes: those of
    the tensors. chunk: elements of a chunk of a transform, each of which is a block, and of which zeros are selected, too; 0 for
    the sparsifier's blocks.
    """
    block = chunk or sparsifier.block
    blocks = _blocks_of(sizes, sparsifier, block, str(gradient.device))
    room, device = blocks.room, gradient.device
    positions, bits = torch.empty((2, room), dtype=torch.int32, device=device)
    counts, special = (
        torch.zeros(blocks.number, dtype=torch.int32, device=device),
        torch.zeros(1, dtype=torch.int32, device=device),
    )
    fused, width = residual is not None, max(16, triton.next_power_of_2(block))
    launch(
        select_in_blocks, blocks.number, gradient, residual if fused else gradient, out, *blocks.table, positions, bits, counts,
        special, FUSED=fused, ZEROS=chunk > 0, BLOCK=width, num_warps=max(1, min(16, width // 256)),
    )  # fmt: skip
    ends = torch.cumsum(counts, 0, dtype=torch.int32)
    n, found = torch.cat([ends[-1:], special]).tolist() if blocks.number else (0, 0)  # the one time that the host waits
    if n < room:
        joined = torch.empty((2, n), dtype=torch.int32, device=device)
        launch(join_blocks, blocks.number, positions, bits, blocks.table[3], counts, ends, *joined, BLOCK=128, num_warps=1)
        positions, bits = joined
    return Selection(positions, bits, not found)


class _Blocks:
    """Where blocks begin, int64, their sizes and how many of each are selected, int32, and where these are written, int64."""

    def __init__(self, sizes: tuple[int, ...], sparsifier: TopK, block: int, device: str):
        given = np.array(sizes, np.int64)
        blocks = -(-given // block)
        within = np.arange(blocks.sum()) - np.repeat(np.cumsum(blocks) - blocks, blocks)
        starts = np.repeat(np.cumsum(given) - given, blocks) + within * block
        elements = np.minimum(np.repeat(given, blocks) - within * block, block)
        kinds, kind = np.unique(elements, return_inverse=True)
        ranks = np.array([sparsifier.count(int(n)) for n in kinds], np.int64)[kind]
        self.number, self.room = len(starts), int(ranks.sum())
        arrays = starts, elements.astype(np.int32), ranks.astype(np.int32), np.cumsum(ranks) - ranks
        self.table = [to_device(array, device) for array in arrays]


_blocks_of = functools.lru_cache(maxsize=64)(_Blocks)
