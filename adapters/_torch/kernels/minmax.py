"""The nearest of evenly spaced levels between the extremes. The counterpart of grace_ext/kernels/minmax.py, for one chunk."""

import triton
import triton.language as tl

from ._helpers import bucket_offsets, load_codes, store_codes, store_remainder
from ._launch import blocks, launch
from .ranges import range_of

BLOCK = 1024


@triton.jit
def minmax_encode(
    values, positions, remainder, found, ranges, out, n,
    WIDTH: tl.constexpr, KEEP: tl.constexpr, SPARSE: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Quantize float32[n] to levels of WIDTH bits. found: what value_range gave; ranges: float32[2], both extremes.

    out: uint8[ceil(n * WIDTH / 8)]. All is in float64, as on the host. For the rest see qsgd_encode.
    """
    smallest, largest = range_of(found)
    if tl.program_id(0) == 0:
        tl.store(ranges, smallest)
        tl.store(ranges + 1, largest)
    top: tl.constexpr = (1 << WIDTH) - 1
    low = smallest.to(tl.float64)
    width = largest.to(tl.float64) - low
    scale = tl.where(width > 0, top / tl.where(width > 0, width, 1.0), 0.0)
    at = bucket_offsets(BLOCK)
    inside = at < n
    x = tl.load(values + at, mask=inside, other=0.0)
    level = tl.where(inside, (x.to(tl.float64) - low) * scale + 0.5, 0.0).to(tl.int32)
    store_codes(out, level.to(tl.int64), tl.program_id(0).to(tl.int64) * BLOCK, n, WIDTH)
    if KEEP:
        decoded = (low + level.to(tl.float64) * (width / top)).to(tl.float32)
        store_remainder(remainder, positions, at, inside, x - decoded, SPARSE)


@triton.jit
def minmax_decode(packed, ranges, out, n, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """The inverse of minmax_encode. out: float32[n]."""
    low = tl.load(ranges).to(tl.float64)
    step = (tl.load(ranges + 1).to(tl.float64) - low) / ((1 << WIDTH) - 1)
    at = bucket_offsets(BLOCK)
    level = load_codes(packed, tl.program_id(0).to(tl.int64) * BLOCK, n, WIDTH, BLOCK // 8)
    tl.store(out + at, (low + level.to(tl.float64) * step).to(tl.float32), mask=at < n)


def encode(source, found, ranges, out, width: int) -> None:
    """See the kernel. source: a device_values.Source without a residual."""
    n, flags = source.values.numel(), source.flags()
    values, _, positions, remainder = source.arrays(ranges)
    launch(
        minmax_encode, blocks(n, BLOCK), values, positions, remainder, found, ranges, out, n, WIDTH=width,
        KEEP=flags["KEEP"], SPARSE=flags["SPARSE"], BLOCK=BLOCK,
    )  # fmt: skip


def decode(packed, ranges, out, width: int) -> None:
    """See the kernel."""
    launch(minmax_decode, blocks(out.numel(), BLOCK), packed, ranges, out, out.numel(), WIDTH=width, BLOCK=BLOCK)
