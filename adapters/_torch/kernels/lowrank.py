"""The product of low-rank factors, in the order of the host's. The counterpart of expand in grace_ext/kernels/lowrank.py."""

import triton
import triton.language as tl

from ._helpers import NON_FINITE, block_offsets, magnitude_of, wide
from ._launch import blocks, launch

BLOCK = 1024


@triton.jit
def expand_factors(
    pt, qt, own, weight, out, residual, largest, rows, columns, rank, KEEP: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """out = weight * P·Qᵀ, and residual -= P·ownᵀ if KEEP, where what would not be finite becomes 0.

    pt: float32[rank, rows]; qt, own: float32[rank, columns]; out, residual: float32[rows * columns]; largest: int32[1], at least
    the bits of out's largest magnitude afterwards. Each product is summed from 0 over the rank in ascending order.
    """
    at = block_offsets(BLOCK)
    inside = at < wide(rows) * columns
    row, column = at // columns, at % columns
    product = tl.zeros([BLOCK], tl.float32)
    carried = tl.zeros([BLOCK], tl.float32)
    for i in range(rank):
        p = tl.load(pt + i * wide(rows) + row, mask=inside, other=0.0)
        product += p * tl.load(qt + i * wide(columns) + column, mask=inside, other=0.0)
        if KEEP:
            carried += p * tl.load(own + i * wide(columns) + column, mask=inside, other=0.0)
    product = product * weight
    tl.store(out + at, product, mask=inside)
    tl.atomic_max(largest, tl.max(tl.where(inside, magnitude_of(product).to(tl.int32), 0)), sem="relaxed")
    if KEEP:
        error = tl.load(residual + at, mask=inside, other=0.0) - carried
        tl.store(residual + at, tl.where(magnitude_of(error) < NON_FINITE, error, 0.0), mask=inside)


def expand(pt, qt, own, weight: float, out, residual, largest) -> None:
    """See the kernel. residual: empty for none."""
    (rank, rows), columns = pt.shape, qt.shape[1]
    keep = residual.numel() > 0
    launch(
        expand_factors, blocks(out.numel(), BLOCK), pt, qt, own, weight, out, residual if keep else out, largest, rows, columns, rank,
        KEEP=keep, BLOCK=BLOCK,
    )  # fmt: skip
