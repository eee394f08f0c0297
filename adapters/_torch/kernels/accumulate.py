"""Adding decoded containers to a gradient. The counterpart of grace_ext/kernels/accumulate.py."""

import triton
import triton.language as tl

from ._helpers import block_offsets
from ._launch import blocks, launch

BLOCK = 1024


@triton.jit
def add_at(out, positions, values, weight, d, n, BLOCK: tl.constexpr):
    """out[positions] += weight * values. positions: int32[n], unique; those that are not below d are left out."""
    at = block_offsets(BLOCK)
    place = tl.load(positions + at, mask=at < n, other=-1)
    inside = (at < n) & (place >= 0) & (place < d)
    before = tl.load(out + place, mask=inside, other=0.0)
    tl.store(out + place, before + weight * tl.load(values + at, mask=inside, other=0.0), mask=inside)


@triton.jit
def add_dense(out, values, weight, d, BLOCK: tl.constexpr):
    """out += weight * values, both float32[d]."""
    at = block_offsets(BLOCK)
    inside = at < d
    before = tl.load(out + at, mask=inside, other=0.0)
    tl.store(out + at, before + weight * tl.load(values + at, mask=inside, other=0.0), mask=inside)


def add(out, positions, values, weight: float) -> None:
    """Add weight * values, float32[n], to `out`, float32[d], at positions, int32[n], or everywhere where they are None."""
    n = values.numel()
    if positions is None:
        launch(add_dense, blocks(n, BLOCK), out, values, weight, n, BLOCK=BLOCK)
    else:
        launch(add_at, blocks(n, BLOCK), out, positions, values, weight, out.numel(), n, BLOCK=BLOCK)
