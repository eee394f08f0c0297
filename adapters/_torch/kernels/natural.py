"""Stochastic rounding to powers of two. The counterpart of grace_ext/kernels/natural.py."""

import torch
import triton
import triton.language as tl

from ._helpers import (
    bits_of,
    block_offsets,
    bucket_offsets,
    float_of,
    load_codes,
    load_source,
    magnitude_of,
    random32,
    store_codes,
    store_remainder,
    uint32_of,
)  # fmt: skip
from ._launch import blocks, launch, signed32

BLOCK = 1024
NOTHING = tl.constexpr(0x7FFFFFFF)  # in found[0]: all values are zeros
_LAST = tl.constexpr(254)  # the largest biased exponent of a finite float32


@triton.jit
def nonzero_range(values, residual, found, special, n, FUSED: tl.constexpr, SPARSE: tl.constexpr, BLOCK: tl.constexpr):
    """Lower found[0] and raise found[1], int32[2], to the bits of the smallest magnitude that is not 0, less 1, and the largest.

    values: float32[n]. If FUSED, the residual is added to them first. For special see load_source.
    """
    at = block_offsets(BLOCK)
    inside = at < n
    x = load_source(values, residual, at, inside, special, FUSED, SPARSE)
    if FUSED:
        tl.store(values + at, x, mask=inside)
    magnitude = magnitude_of(x).to(tl.int32)
    tl.atomic_min(found, tl.min(tl.where(magnitude > 0, magnitude - 1, NOTHING)), sem="relaxed")
    tl.atomic_max(found + 1, tl.max(magnitude), sem="relaxed")


@triton.jit(do_not_specialize=["low", "high"])  # a key of each step must not mean a compilation
def natural_encode(
    values, positions, remainder, found, exponents, out, n, low, high,
    WIDTH: tl.constexpr, KEEP: tl.constexpr, SPARSE: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Round float32[n] to 0 and powers of two, unbiased. found: what nonzero_range gave.

    exponents: int32[2], the smallest biased exponent of a power and how many there are, at most 2**(WIDTH - 1) - 1. out: levels
    of WIDTH bits, uint8[ceil(n * WIDTH / 8)]. For the rest see qsgd_encode.
    """
    smallest = tl.load(found)
    smallest = tl.where(smallest == NOTHING, 0, smallest + 1)
    top = tl.minimum((tl.load(found + 1).to(tl.uint32) + 0x7FFFFF) >> 23, _LAST).to(tl.int32)
    lowest = tl.maximum(tl.maximum(smallest >> 23, top - (1 << (WIDTH - 1)) + 2), 1)
    count = top - lowest + 1
    if tl.program_id(0) == 0:
        tl.store(exponents, lowest)
        tl.store(exponents + 1, count)
    at = bucket_offsets(BLOCK)
    inside = at < n
    x = tl.load(values + at, mask=inside, other=0.0)
    bits = bits_of(x)
    exponent = ((bits >> 23) & 0xFF).to(tl.int32)
    mantissa = (bits & 0x7FFFFF) | tl.where(exponent > 0, 0x800000, 0).to(tl.uint32)
    above = tl.maximum(exponent, 1) - lowest
    mantissa = mantissa >> tl.minimum(tl.maximum(-above, 0), 31).to(tl.uint32)
    carried = mantissa + (random32(at.to(tl.uint32), uint32_of(low), uint32_of(high)) >> 9)
    power = tl.minimum(tl.maximum(above, 0) + (carried >> 23).to(tl.int32), count)
    negative = bits >= 0x80000000
    level = tl.where(inside, count + tl.where(negative, -power, power), 0)
    store_codes(out, level.to(tl.int64), tl.program_id(0).to(tl.int64) * BLOCK, n, WIDTH)
    if KEEP:
        store_remainder(remainder, positions, at, inside, x - _power_of_two(power, lowest, negative), SPARSE)


@triton.jit
def _power_of_two(power, lowest, negative):
    """0 for power 0, else the power-th of the powers from the biased exponent `lowest` on, counted from 1, with a sign."""
    magnitude = tl.where(power > 0, (power + lowest - 1) << 23, 0).to(tl.uint32)
    return float_of(tl.where(negative & (power > 0), magnitude | 0x80000000, magnitude))


@triton.jit
def natural_decode(packed, out, bad, lowest, count, n, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """The inverse of natural_encode. out: float32[n]; bad: int32[1], set to 1 if a level is out of range."""
    at = bucket_offsets(BLOCK)
    inside = at < n
    level = load_codes(packed, tl.program_id(0).to(tl.int64) * BLOCK, n, WIDTH, BLOCK // 8).to(tl.int32)
    above = level - count
    tl.store(out + at, _power_of_two(tl.abs(above), lowest, above < 0), mask=inside)
    tl.atomic_max(bad, 1, mask=tl.max((inside & (level > 2 * count)).to(tl.int32)) > 0, sem="relaxed")


def find_range(source, found: torch.Tensor, special):
    """See nonzero_range; found: int32[2]. Returns the source of the same values without a residual, which has been added."""
    n, flags = source.values.numel(), source.flags()
    found[0].fill_(NOTHING.value)
    found[1].zero_()
    launch(
        nonzero_range, blocks(n, BLOCK), source.values, source.residual if flags["FUSED"] else source.values, found,
        found if special is None else special, n, FUSED=flags["FUSED"], SPARSE=flags["SPARSE"], BLOCK=BLOCK,
    )  # fmt: skip
    return source.without_residual()


def encode(source, found, exponents, out, special, width: int, key: tuple[int, int]) -> None:
    """See the kernels. source: a device_values.Source; found: int32[2]."""
    source = find_range(source, found, special)
    n, flags = source.values.numel(), source.flags()
    values, _, positions, remainder = source.arrays(exponents)
    launch(
        natural_encode, blocks(n, BLOCK), values, positions, remainder, found, exponents, out, n, *map(signed32, key), WIDTH=width,
        KEEP=flags["KEEP"], SPARSE=flags["SPARSE"], BLOCK=BLOCK,
    )  # fmt: skip


def decode(packed, out: torch.Tensor, bad, lowest: int, count: int, width: int) -> None:
    """See the kernel."""
    n = out.numel()
    launch(natural_decode, blocks(n, BLOCK), packed, out, bad, lowest, count, n, WIDTH=width, BLOCK=BLOCK)
