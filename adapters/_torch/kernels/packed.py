"""float32 to 8 bits with a scale for each block, and to bfloat16, rounded at random. The counterpart of grace_ext/kernels/packed.py."""

import triton
import triton.language as tl

from ._helpers import MAGNITUDE, bits_of, block_offsets, float_of, magnitude_of, random32
from ._launch import blocks, launch

BLOCK = 128  # elements with one scale
ROWS = 8  # blocks of a program
WIDE = 1024
_LARGEST = tl.constexpr(0x7F7FFFFF)  # the bits of the largest finite float32
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
    kept = (largest >= _SMALLEST) & (largest <= _LARGEST)
    exponent = tl.where(kept, exponent, 127)
    inverse = float_of((254 - exponent) << 23)
    random = _random16(x, at).to(tl.float32) * 1.52587890625e-05  # 2**-16
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
    x = tl.load(values + at, mask=at < d, other=0.0)
    magnitude = tl.minimum((bits_of(x) & MAGNITUDE) + _random16(x, at), _LARGEST)
    half = (magnitude | (bits_of(x) & 0x80000000)) >> 16
    tl.store(halves + at, half.to(tl.uint16).to(tl.int16, bitcast=True), mask=at < d)


@triton.jit
def _random16(x, at):
    """A hash of 16 bits of each value and its position, uint32."""
    return random32(at.to(tl.uint32), bits_of(x), tl.zeros(at.shape, tl.uint32)) >> 16


def pack(values, codes, scales) -> None:
    """Pack float32[d]: to int8[d] with a scale for each block, or, where scales is None, to bfloat16 as int16[d]."""
    d = values.numel()
    if scales is None:
        launch(pack16, blocks(d, WIDE), values, codes, d, WIDE=WIDE)
    else:
        launch(pack8, blocks(d, ROWS * BLOCK), values, codes, scales, d, ROWS=ROWS, BLOCK=BLOCK)


def unpack(codes, scales, out) -> None:
    """The inverse of pack with scales."""
    launch(unpack8, blocks(out.numel(), WIDE), codes, scales, out, out.numel(), WIDE=WIDE, BLOCK=BLOCK)
