"""The smallest and the largest of all values, for codecs with one scale for all of them."""

import torch
import triton
import triton.language as tl

from ._helpers import bits_of, block_offsets, float_of, load_source, ordered
from ._launch import blocks, launch

BLOCK = 2048


@triton.jit
def value_range(values, residual, found, special, n, FUSED: tl.constexpr, SPARSE: tl.constexpr, BLOCK: tl.constexpr):
    """Lower found[0] and raise found[1], int32[2], to the smallest and the largest of float32[n], in integers of their order.

    If FUSED, the residual is added to the values first. For special see load_source.
    """
    at = block_offsets(BLOCK)
    inside = at < n
    x = load_source(values, residual, at, inside, special, FUSED, SPARSE)
    if FUSED:
        tl.store(values + at, x, mask=inside)
    place = ordered(bits_of(x).to(tl.int32, bitcast=True))
    tl.atomic_min(found, tl.min(tl.where(inside, place, 0x7FFFFFFF)), sem="relaxed")
    tl.atomic_max(found + 1, tl.max(tl.where(inside, place, -0x80000000)), sem="relaxed")


@triton.jit
def range_of(found):
    """The smallest and the largest value, float32."""
    low, high = ordered(tl.load(found)), ordered(tl.load(found + 1))
    return float_of(low.to(tl.uint32, bitcast=True)), float_of(high.to(tl.uint32, bitcast=True))


def find(source, found: torch.Tensor, special):
    """See the kernel; found: int32[2]. Returns the source of the same values without a residual, which has been added."""
    n = source.values.numel()
    found[0].fill_(2**31 - 1)
    found[1].fill_(-(2**31))
    launch(
        value_range, blocks(n, BLOCK), source.values, source.values if source.residual is None else source.residual, found,
        found if special is None else special, n, FUSED=source.residual is not None, SPARSE=source.positions is not None,
        BLOCK=BLOCK,
    )  # fmt: skip
    return source.without_residual()
