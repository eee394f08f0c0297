"""Rice codes of the gaps between ascending positions, in two streams. The counterpart of grace_ext/kernels/rice.py.

The place of each code in both streams follows from cumulative sums, so that all codes are written, and read, at once.
"""

import torch
import triton
import triton.language as tl

from ._helpers import block_offsets
from ._launch import blocks, launch

BLOCK = 1024


@triton.jit
def rice_quotients(positions, sums, n, e, BLOCK: tl.constexpr):
    """sums[b] = the sum of the quotients of a block: of the gaps before its positions, int32[n], without their lower e bits."""
    at = block_offsets(BLOCK)
    inside = at < n
    quotient = tl.where(inside, _gap_before(positions, at, inside) >> e, 0)
    tl.store(sums + tl.program_id(0), tl.sum(quotient))


@triton.jit
def _gap_before(positions, at, inside):
    index = tl.load(positions + at, mask=inside, other=0)
    return index - 1 - tl.load(positions + at - 1, mask=inside & (at > 0), other=-1)


@triton.jit
def rice_write(positions, sums, ends, remainders, unary, n, e, BLOCK: tl.constexpr):
    """Write the lower bits of all gaps to one stream and the ones behind their quotients to the other.

    positions: int32[n]. sums: what rice_quotients gave; ends: its cumulative sums. remainders, unary: the streams as int32
    words, zeroed.
    """
    at = block_offsets(BLOCK)
    inside = at < n
    gap = _gap_before(positions, at, inside)
    low = (gap & ((1 << e) - 1)).to(tl.int64)
    bit = at * e
    shifted = low << (bit & 31)
    tl.atomic_or(remainders + (bit >> 5), shifted.to(tl.int32), mask=inside & (low > 0), sem="relaxed")
    second = (shifted >> 32).to(tl.int32)
    tl.atomic_or(remainders + (bit >> 5) + 1, second, mask=inside & (second != 0), sem="relaxed")
    before = tl.load(ends + tl.program_id(0)) - tl.load(sums + tl.program_id(0))
    one = (before + tl.cumsum(tl.where(inside, gap >> e, 0))).to(tl.int64) + at
    end = (tl.full([BLOCK], 1, tl.int64) << (one & 31)).to(tl.int32)
    tl.atomic_or(unary + (one >> 5), end, mask=inside, sem="relaxed")


@triton.jit
def rice_count_ones(unary, counts, words, BLOCK: tl.constexpr):
    """counts[i] = the number of ones in word i. Both int32[words]."""
    at = block_offsets(BLOCK)
    x = tl.load(unary + at, mask=at < words, other=0).to(tl.uint32, bitcast=True)
    x = x - ((x >> 1) & 0x55555555)
    x = (x & 0x33333333) + ((x >> 2) & 0x33333333)
    x = (x + (x >> 4)) & 0x0F0F0F0F
    tl.store(counts + at, ((x * 0x01010101) >> 24).to(tl.int32), mask=at < words)


@triton.jit
def rice_read(unary, ends, remainders, quotients, low, words, n, e, BLOCK: tl.constexpr):
    """Read up to n codes: quotients[j] = the sum of the quotients up to code j, low[j] = the lower bits of its gap.

    unary, remainders: the streams as int32 words, the latter with one word behind them. ends: the cumulative sums of what
    rice_count_ones gave.
    """
    at = block_offsets(BLOCK)
    inside = at < words
    word = tl.load(unary + at, mask=inside, other=0).to(tl.uint32, bitcast=True)
    code = tl.load(ends + at - 1, mask=inside & (at > 0), other=0).to(tl.int64)
    for bit in range(32):
        found = inside & (((word >> bit) & 1) > 0) & (code < n)
        tl.store(quotients + code, (at * 32 + bit - code).to(tl.int32), mask=found)
        start = code * e
        first = tl.load(remainders + (start >> 5), mask=found, other=0).to(tl.uint32, bitcast=True).to(tl.int64)
        second = tl.load(remainders + (start >> 5) + 1, mask=found, other=0).to(tl.uint32, bitcast=True).to(tl.int64)
        value = (first | (second << 32)) >> (start & 31)
        tl.store(low + code, (value & ((1 << e) - 1)).to(tl.int32), mask=found)
        code += ((word >> bit) & 1).to(tl.int64)


@triton.jit
def rice_positions(quotients, low_ends, positions, n, e, BLOCK: tl.constexpr):
    """positions[j] = the sum of the gaps up to code j, plus j; -1 for what is no int32. low_ends: cumulative sums, int64."""
    at = block_offsets(BLOCK)
    inside = at < n
    zeros = tl.load(quotients + at, mask=inside, other=0).to(tl.int64)
    place = (zeros << e) + tl.load(low_ends + at, mask=inside, other=0) + at
    tl.store(positions + at, tl.where(place < 0x7FFFFFFF, place, -1).to(tl.int32), mask=inside)


def words_of(size: int) -> int:
    """The number of int32 words that hold `size` bytes and one more word, because two are read at a time."""
    return size // 4 + 2


def encode(positions: torch.Tensor, e: int, remainders: torch.Tensor, unary: torch.Tensor) -> torch.Tensor:
    """Write the codes of positions, int32[n], n >= 1, ascending; returns the bits of the second stream, int32[1].

    remainders, unary: int32[m], zeroed, with room for the streams and a word; see the host's remainder_bytes and quotient_room.
    """
    n = positions.numel()
    sums = torch.empty(blocks(n, BLOCK), dtype=torch.int32, device=positions.device)
    launch(rice_quotients, blocks(n, BLOCK), positions, sums, n, e, BLOCK=BLOCK)
    ends = torch.cumsum(sums, 0, dtype=torch.int32)
    launch(rice_write, blocks(n, BLOCK), positions, sums, ends, remainders, unary, n, e, BLOCK=BLOCK)
    return ends[-1:] + n


def decode(remainders: torch.Tensor, unary: torch.Tensor, e: int, n: int, positions: torch.Tensor) -> torch.Tensor:
    """Read n codes from streams of int32 words; returns the number of ones in the second stream, int32[1].

    remainders has a word behind the stream. positions: int32[n], written; undefined where there are fewer ones than n.
    """
    words, device = unary.numel(), unary.device
    counts = torch.empty(words, dtype=torch.int32, device=device)
    launch(rice_count_ones, blocks(words, BLOCK), unary, counts, words, BLOCK=BLOCK)
    ends = torch.cumsum(counts, 0, dtype=torch.int32)
    quotients, low = torch.empty((2, n), dtype=torch.int32, device=device)
    launch(rice_read, blocks(words, BLOCK), unary, ends, remainders, quotients, low, words, n, e, BLOCK=BLOCK)
    low_ends = torch.cumsum(low, 0, dtype=torch.int64)
    launch(rice_positions, blocks(n, BLOCK), quotients, low_ends, positions, n, e, BLOCK=BLOCK)
    return ends[-1:]
