"""float32 to 8 bits with a scale for each block, and to bfloat16, rounded at random. The counterpart of grace_ext/kernels/packed.py."""

import triton
import triton.language as tl

from ._helpers import LARGEST, block_offsets, float_of, half_of, magnitude_of, random16, store_state
from ._launch import blocks, launch

BLOCK = 128  # elements with one scale
ROWS = 8  # blocks of a program
WIDE = 1024
_NEARLY_LARGEST = tl.constexpr(0x7F7E0000)  # those of 127 * 2**121
_SMALLEST = tl.constexpr(8 << 23)  # those of 2**-119


@triton.jit
def pack8(values, codes, scales, d, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """codes = values / scale, rounded to one of both neighbors. values: float32[d]; codes: int8[d]; scales: float32[d / BLOCK]."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    at = row[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    x = tl.load(values + at, mask=at < d, other=0.0)
    largest = tl.max(magnitude_of(x).to(tl.int32), axis=1).to(tl.uint32)
    reaches = ((largest & 0x7FFFFF) <= 0x7E0000) | (largest > _NEARLY_LARGEST)
    exponent = (largest >> 23) - tl.where(reaches, 6, 5).to(tl.uint32)
    kept = (largest >= _SMALLEST) & (largest <= LARGEST)
    exponent = tl.where(kept, exponent, 127)
    inverse = float_of((254 - exponent) << 23)
    random = random16(x, at).to(tl.float32) * 1.52587890625e-05  # 2**-16
    exact = tl.where(kept[:, None], x * inverse[:, None] + random, 0.0)
    code = exact.to(tl.int32)
    code -= (code.to(tl.float32) > exact).to(tl.int32)  # the floor; that of PTX takes subnormal numbers for 0
    tl.store(codes + at, tl.minimum(tl.maximum(code, -127), 127).to(tl.int8), mask=at < d)
    scale = tl.where(kept, float_of(exponent << 23), 0.0)
    tl.store(scales + row, scale, mask=row * BLOCK < d)


@triton.jit
def unpack8(codes, scales, out, d, WIDE: tl.constexpr, BLOCK: tl.constexpr):
    """out = codes * scale. out: float32[d]."""
    at = block_offsets(WIDE)
    code = tl.load(codes + at, mask=at < d, other=0).to(tl.float32)
    tl.store(out + at, code * tl.load(scales + at // BLOCK, mask=at < d, other=0.0), mask=at < d)


@triton.jit
def pack16(values, halves, d, WIDE: tl.constexpr):
    """The bits of bfloat16[d], int16, rounded to one of both neighbors; never to Inf. values: float32[d]."""
    at = block_offsets(WIDE)
    tl.store(halves + at, half_of(tl.load(values + at, mask=at < d, other=0.0), at), mask=at < d)


@triton.jit
def store_at(values, positions, state, n, WIDE: tl.constexpr):
    """state[positions] = values; see store_state. values: float32[n]; positions: int32[n]."""
    at = block_offsets(WIDE)
    place = tl.load(positions + at, mask=at < n, other=0)
    store_state(state, place, tl.load(values + at, mask=at < n, other=0.0), at < n)


def pack(values, codes, scales) -> None:
    """Pack float32[d]: to int8[d] with a scale for each block, or, where scales is None, to bfloat16 as int16[d]."""
    d = values.numel()
    if scales is None:
        launch(pack16, blocks(d, WIDE), values, codes, d, WIDE=WIDE)
    else:
        launch(pack8, blocks(d, ROWS * BLOCK), values, codes, scales, d, ROWS=ROWS, BLOCK=BLOCK)


def put(values, positions, state) -> None:
    """See store_at."""
    launch(store_at, blocks(values.numel(), WIDE), values, positions, state, values.numel(), WIDE=WIDE)


def unpack(codes, scales, out) -> None:
    """The inverse of pack with scales."""
    launch(unpack8, blocks(out.numel(), WIDE), codes, scales, out, out.numel(), WIDE=WIDE, BLOCK=BLOCK)
