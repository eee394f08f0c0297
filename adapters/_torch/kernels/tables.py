"""Levels that a table gives values: packing them, looking them up, and what they do not carry."""

import torch
import triton
import triton.language as tl

from ._helpers import block_offsets, bucket_offsets, store_codes, store_remainder
from ._launch import blocks, launch

BLOCK = 1024
NO_ESCAPE = 256  # no level has this number


@triton.jit
def pack_levels(levels, out, n, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """Pack uint8[n] at WIDTH bits each, the least significant bit first. out: uint8[ceil(n * WIDTH / 8)]."""
    at = bucket_offsets(BLOCK)
    level = tl.load(levels + at, mask=at < n, other=0)
    store_codes(out, level.to(tl.int64), tl.program_id(0).to(tl.int64) * BLOCK, n, WIDTH)


@triton.jit
def subtract_levels(
    values, levels, table, positions, remainder, n, escape, SPARSE: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Write values, float32[n], minus table[levels] to `remainder`, as qsgd_encode does; 0 where the level is `escape`."""
    at = block_offsets(BLOCK)
    inside = at < n
    level = tl.load(levels + at, mask=inside, other=0).to(tl.int32)
    x = tl.load(values + at, mask=inside, other=0.0)
    decoded = tl.where(level == escape, x, tl.load(table + level, mask=inside, other=0.0))
    store_remainder(remainder, positions, at, inside, x - decoded, SPARSE)


@triton.jit
def look_up(levels, table, out, n, BLOCK: tl.constexpr):
    """out[i] = table[levels[i]]. levels: uint8[n]; table: float32[256]; out: float32[n]."""
    at = block_offsets(BLOCK)
    inside = at < n
    level = tl.load(levels + at, mask=inside, other=0).to(tl.int32)
    tl.store(out + at, tl.load(table + level, mask=inside, other=0.0), mask=inside)


def pack(levels: torch.Tensor, out: torch.Tensor, width: int) -> None:
    """See the kernel."""
    n = levels.numel()
    launch(pack_levels, blocks(n, BLOCK), levels, out, n, WIDTH=width, BLOCK=BLOCK)


def subtract(source, levels: torch.Tensor, table: torch.Tensor, escape: int = NO_ESCAPE) -> None:
    """See the kernel. source: a device_values.Source with a remainder, and without a residual."""
    n = levels.numel()
    values, _, positions, remainder = source.arrays(table)
    launch(
        subtract_levels, blocks(n, BLOCK), values, levels, table, positions, remainder, n, escape,
        SPARSE=source.flags()["SPARSE"], BLOCK=BLOCK,
    )  # fmt: skip


def decode(levels: torch.Tensor, table: torch.Tensor, out: torch.Tensor) -> None:
    """See look_up."""
    launch(look_up, blocks(out.numel(), BLOCK), levels, table, out, out.numel(), BLOCK=BLOCK)
