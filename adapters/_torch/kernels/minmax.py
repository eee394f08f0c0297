"""The nearest of evenly spaced levels between the extremes. The counterpart of grace_ext/kernels/minmax.py."""

import torch
import triton
import triton.language as tl

from . import tables
from ._helpers import bits_of, bucket_offsets, float_of, load_codes, load_source, ordered, store_codes, store_remainder
from ._launch import blocks, launch
from .ranges import range_of

BLOCK = 1024
MOST_CHUNK = 2048  # values of a chunk, which a program keeps in registers


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


@triton.jit
def encode_chunks(
    values, residual, positions, remainder, ranges, levels, special, n, chunk,
    WIDTH: tl.constexpr, FUSED: tl.constexpr, KEEP: tl.constexpr, SPARSE: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Quantize each `chunk` of float32[n], or values + residual if FUSED, between its own extremes; a program for each.

    ranges: float32[chunks, 2]; levels: uint8[n], not packed. All is in float64. For the rest see qsgd_encode.
    """
    lane = tl.arange(0, BLOCK)
    at = tl.program_id(0).to(tl.int64) * chunk + lane
    inside = (lane < chunk) & (at < n)
    x = load_source(values, residual, at, inside, special, FUSED, SPARSE)
    place = ordered(bits_of(x).to(tl.int32, bitcast=True))
    smallest = ordered(tl.min(tl.where(inside, place, 0x7FFFFFFF)))
    largest = ordered(tl.max(tl.where(inside, place, -0x80000000)))
    smallest, largest = float_of(smallest.to(tl.uint32, bitcast=True)), float_of(largest.to(tl.uint32, bitcast=True))
    tl.store(ranges + 2 * tl.program_id(0), smallest)
    tl.store(ranges + 2 * tl.program_id(0) + 1, largest)
    top: tl.constexpr = (1 << WIDTH) - 1
    low = smallest.to(tl.float64)
    width = largest.to(tl.float64) - low
    scale = tl.where(width > 0, top / tl.where(width > 0, width, 1.0), 0.0)
    level = tl.where(inside, (x.to(tl.float64) - low) * scale + 0.5, 0.0).to(tl.int32)
    tl.store(levels + at, level.to(tl.uint8), mask=inside)
    if KEEP:
        decoded = (low + level.to(tl.float64) * (width / top)).to(tl.float32)
        store_remainder(remainder, positions, at, inside, x - decoded, SPARSE)


@triton.jit
def decode_chunks(packed, ranges, out, n, chunk, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """The inverse of encode_chunks, of levels that are packed. out: float32[n]."""
    at = bucket_offsets(BLOCK)
    inside = at < n
    level = load_codes(packed, tl.program_id(0).to(tl.int64) * BLOCK, n, WIDTH, BLOCK // 8)
    low = tl.load(ranges + 2 * (at // chunk), mask=inside, other=0.0).to(tl.float64)
    step = (tl.load(ranges + 2 * (at // chunk) + 1, mask=inside, other=0.0).to(tl.float64) - low) / ((1 << WIDTH) - 1)
    tl.store(out + at, (low + level.to(tl.float64) * step).to(tl.float32), mask=inside)


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


def encode_of_chunks(source, ranges, out, special, width: int, chunk: int) -> None:
    """See encode_chunks; out: the packed levels. source: a device_values.Source."""
    n, levels = source.values.numel(), torch.empty(source.values.numel(), dtype=torch.uint8, device=out.device)
    size = max(16, triton.next_power_of_2(chunk))
    launch(
        encode_chunks, blocks(n, chunk), *source.arrays(ranges), ranges, levels, levels if special is None else special, n, chunk,
        WIDTH=width, **source.flags(), BLOCK=size, num_warps=max(1, min(16, size // 256)),
    )  # fmt: skip
    tables.pack(levels, out, width)


def decode_of_chunks(packed, ranges, out, width: int, chunk: int) -> None:
    """See decode_chunks."""
    launch(
        decode_chunks, blocks(out.numel(), BLOCK), packed, ranges, out, out.numel(), chunk, WIDTH=width, BLOCK=BLOCK,
    )  # fmt: skip
