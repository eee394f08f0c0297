"""Nearest of three levels, five in a byte, with runs of zeros folded. The counterpart of grace_ext/kernels/ternary.py.

A run is folded from its beginning in groups of 14 bytes, so a byte is written if it is no zero or the first of a group. Where a
run has begun is known from the last byte before it that is no zero: of its block, or the last of all blocks before.
"""

import torch
import triton
import triton.language as tl

from ._helpers import bits_of, block_offsets, float_of, magnitude_of, store_remainder
from ._launch import blocks, launch
from .natural import find_range

BLOCK = 256  # bytes of a program that makes them
FOLD_BLOCK = 64  # bytes of a program that folds them; it compares each with each
_ZEROS = tl.constexpr(121)  # the byte of five zeros
_GROUP = tl.constexpr(14)  # bytes of zeros that one byte can stand for
_RUN = tl.constexpr(243)  # the byte that stands for two


@triton.jit
def nearest_encode(
    values, positions, remainder, found, s, scale_out, out, n, KEEP: tl.constexpr, SPARSE: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Round float32[n] to the nearest of 0 and +- s times the largest magnitude. found: what nonzero_range gave.

    s: float64[1]; scale_out: float32[1], the magnitude; out: uint8[ceil(n / 5)]. For the rest see qsgd_encode.
    """
    largest = float_of(tl.load(found + 1).to(tl.uint32, bitcast=True)).to(tl.float64) * tl.load(s)
    scale = tl.minimum(largest, 3.4028234663852886e38).to(tl.float32)
    bound = tl.maximum(bits_of((largest * 0.5).to(tl.float32)).to(tl.int32, bitcast=True), 1)
    if tl.program_id(0) == 0:
        tl.store(scale_out, scale)
    byte = block_offsets(BLOCK)
    packed = tl.zeros([BLOCK], tl.int32)
    for i in tl.static_range(5):
        at = 5 * byte + i
        inside = at < n
        x = tl.load(values + at, mask=inside, other=0.0)
        step = (magnitude_of(x).to(tl.int32) >= bound).to(tl.int32)
        step = tl.where(bits_of(x) >= 0x80000000, -step, step)
        packed = 3 * packed + 1 + step
        if KEEP:
            store_remainder(remainder, positions, at, inside, x - step.to(tl.float32) * scale, SPARSE)
    tl.store(out + byte, packed.to(tl.uint8), mask=5 * byte < n)


@triton.jit
def last_nonzero(packed, lasts, m, BLOCK: tl.constexpr):
    """lasts, int32[blocks]: the place of each block's last byte that is no zero, -1 without one. packed: uint8[m]."""
    at = block_offsets(BLOCK).to(tl.int32)
    inside = at < m
    byte = tl.load(packed + at, mask=inside, other=121)
    tl.store(lasts + tl.program_id(0), tl.max(tl.where(byte != _ZEROS, at, -1)))


@triton.jit
def _written(packed, before, at, m):
    """The bytes, which of them are zeros, and which are written, int32. before: the last place before that is no zero."""
    inside = at < m
    byte = tl.load(packed + at, mask=inside, other=0).to(tl.int32)
    zero = inside & (byte == _ZEROS)
    other = tl.where(zero, -1, at)
    last = tl.maximum(tl.max(tl.where(at[None, :] <= at[:, None], other[None, :], -1), axis=1), before)
    return byte, zero, (inside & ((byte != _ZEROS) | ((at - last - 1) % _GROUP == 0))).to(tl.int32)


@triton.jit
def fold_count(packed, befores, counts, m, BLOCK: tl.constexpr):
    """counts, int32[blocks]: how many bytes are written of each block. befores, int32[blocks]: maxima of `lasts` before it."""
    at = block_offsets(BLOCK).to(tl.int32)
    _, _, kept = _written(packed, tl.load(befores + tl.program_id(0)), at, m)
    tl.store(counts + tl.program_id(0), tl.sum(kept))


@triton.jit
def fold_write(packed, befores, counts, ends, out, m, BLOCK: tl.constexpr):
    """Write the folded bytes, as fold_zeros does on the host. ends, int32[blocks]: the cumulative sum of counts."""
    block = tl.program_id(0)
    at = block_offsets(BLOCK).to(tl.int32)
    byte, zero, kept = _written(packed, tl.load(befores + block), at, m)
    length = zero.to(tl.int32)
    goes_on = zero
    for i in tl.static_range(1, 14):
        goes_on = goes_on & (tl.load(packed + at + i, mask=goes_on & (at + i < m), other=0).to(tl.int32) == _ZEROS)
        length += goes_on.to(tl.int32)
    folded = tl.where(length > 1, _RUN + length - 2, byte)
    place = tl.load(ends + block) - tl.load(counts + block) + tl.cumsum(kept) - kept
    tl.store(out + place, folded.to(tl.uint8), mask=kept > 0)


def encode(source, found, s: float, scale, special) -> torch.Tensor:
    """The bytes of float32[n], uint8[ceil(n / 5)], not folded. source: a device_values.Source; found: int32[2]."""
    source = find_range(source, found, special)
    n, flags = source.values.numel(), source.flags()
    values, _, positions, remainder = source.arrays(scale)
    packed = torch.empty(blocks(n, 5), dtype=torch.uint8, device=values.device)
    multiplier = torch.full((1,), s, dtype=torch.float64, device=values.device)
    launch(
        nearest_encode, blocks(packed.numel(), BLOCK), values, positions, remainder, found, multiplier, scale, packed, n,
        KEEP=flags["KEEP"], SPARSE=flags["SPARSE"], BLOCK=BLOCK,
    )  # fmt: skip
    return packed


def fold(packed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Fold uint8[m]. Returns as many bytes, of which the first are the folded ones, and how many these are, int32[1]."""
    m, device = packed.numel(), packed.device
    programs = blocks(m, FOLD_BLOCK)
    lasts, counts = torch.empty((2, programs), dtype=torch.int32, device=device)
    befores = torch.full((programs,), -1, dtype=torch.int32, device=device)
    folded = torch.empty_like(packed)
    launch(last_nonzero, programs, packed, lasts, m, BLOCK=FOLD_BLOCK, num_warps=2)
    befores[1:].copy_(torch.cummax(lasts, 0).values[:-1])
    launch(fold_count, programs, packed, befores, counts, m, BLOCK=FOLD_BLOCK, num_warps=2)
    ends = torch.cumsum(counts, 0, dtype=torch.int32)
    launch(fold_write, programs, packed, befores, counts, ends, folded, m, BLOCK=FOLD_BLOCK, num_warps=2)
    return folded, ends[-1:]
