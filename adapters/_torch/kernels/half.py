"""float32 to 16 bits and back, by bit arithmetic as on the host. The counterpart of grace_ext/kernels/half.py."""

import triton
import triton.language as tl

from ._helpers import MAGNITUDE, bits_of, block_offsets, float_of, load_source, store_remainder
from ._launch import blocks, launch

BLOCK = 1024


@triton.jit
def half_encode(
    values, residual, positions, remainder, out, special, n,
    BRAIN: tl.constexpr, FUSED: tl.constexpr, KEEP: tl.constexpr, SPARSE: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Round float32[n], or values + residual if FUSED, to nearest even: to bfloat16 if BRAIN, else to float16.

    What is too large becomes the largest number. out: int16[n], the bits. For the rest see qsgd_encode.
    """
    at = block_offsets(BLOCK)
    inside = at < n
    x = load_source(values, residual, at, inside, special, FUSED, SPARSE)
    u = bits_of(x)
    magnitude = u & MAGNITUDE
    half = _to_bfloat16(magnitude) if BRAIN else _to_float16(magnitude)
    half = half | ((u >> 16) & 0x8000)
    tl.store(out + at, half.to(tl.uint16).to(tl.int16, bitcast=True), mask=inside)
    if KEEP:
        store_remainder(remainder, positions, at, inside, x - _to_float32(half, BRAIN), SPARSE)


@triton.jit
def half_decode(halves, out, n, BRAIN: tl.constexpr, BLOCK: tl.constexpr):
    """The inverse of half_encode. halves: int16[n]; out: float32[n]."""
    at = block_offsets(BLOCK)
    half = tl.load(halves + at, mask=at < n, other=0).to(tl.uint16, bitcast=True).to(tl.uint32)
    tl.store(out + at, _to_float32(half, BRAIN), mask=at < n)


@triton.jit
def _to_float16(magnitude):
    magnitude = tl.minimum(magnitude, 0x477FE000)  # 65504
    small = bits_of(float_of(magnitude) + 0.5) - 0x3F000000
    normal = (magnitude + 0xC8000FFF + ((magnitude >> 13) & 1)) >> 13
    return tl.where(magnitude < 0x38800000, small, normal)


@triton.jit
def _to_bfloat16(magnitude):
    magnitude = tl.minimum(magnitude, 0x7F7F0000)
    return (magnitude + 0x7FFF + ((magnitude >> 16) & 1)) >> 16


@triton.jit
def _to_float32(half, BRAIN: tl.constexpr):
    if BRAIN:
        return float_of(half << 16)
    x = (half & 0x7FFF) << 13
    exponent = x & 0x0F800000
    small = bits_of(float_of(x + 0x38800000) - float_of(tl.full(x.shape, 0x38800000, tl.uint32)))
    bias = tl.where(exponent == 0x0F800000, 0x70000000, 0x38000000).to(tl.uint32)
    x = tl.where(exponent == 0, small, x + bias)
    return float_of(x | ((half & 0x8000) << 16))


def encode(source, out, special, brain: bool) -> None:
    """See the kernel. source: a device_values.Source."""
    n = source.values.numel()
    launch(
        half_encode, blocks(n, BLOCK), *source.arrays(out), out, out if special is None else special, n, BRAIN=brain,
        **source.flags(), BLOCK=BLOCK,
    )  # fmt: skip


def decode(halves, out, brain: bool) -> None:
    """See the kernel."""
    launch(half_decode, blocks(out.numel(), BLOCK), halves, out, out.numel(), BRAIN=brain, BLOCK=BLOCK)
