"""Stochastic uniform quantization in buckets. The counterpart of grace_ext/kernels/qsgd.py.

A program does a bucket: its norm, the codes, and what they do not carry.
"""

import triton
import triton.language as tl

from ._helpers import (
    bucket_offsets,
    float_of,
    load_codes,
    load_source,
    magnitude_of,
    random32,
    store_codes,
    store_remainder,
    uint32_of,
)
from ._launch import blocks, launch, signed32

_SMALLEST = tl.constexpr(2.0**-119)  # below it, levels / norm would overflow; such a bucket is sent as zeros
_LARGEST = tl.constexpr(3.4028e38)  # above it, a decoded value could round to Inf
MOST_BUCKET = 2048  # values that a program keeps in registers


@triton.jit(do_not_specialize=["low", "high"])  # a key of each step must not mean a compilation
def qsgd_encode(
    values, residual, positions, remainder, norms, out, special, n, levels, low, high,
    WIDTH: tl.constexpr, BUCKET: tl.constexpr, TWO_NORM: tl.constexpr, FUSED: tl.constexpr, KEEP: tl.constexpr,
    SPARSE: tl.constexpr
):  # fmt: skip
    """Quantize float32[n], or values + residual if FUSED, to levels -s..s, s = levels, at WIDTH bits each.

    norms: float32[buckets]; out: uint8[ceil(n * WIDTH / 8)]. If KEEP, what the codes do not carry goes to remainder[i], or to
    remainder[positions[i]] if SPARSE. special: int32[1], made another number than 0 if a value is not finite; not if SPARSE, where
    that is known.
    """
    bucket = tl.program_id(0)
    first = bucket.to(tl.int64) * BUCKET
    at = bucket_offsets(BUCKET)
    inside = at < n
    x = load_source(values, residual, at, inside, special, FUSED, SPARSE)
    if TWO_NORM:
        norm = _two_norm(values, residual, first, n, BUCKET, FUSED)
        tl.debug_barrier()  # all warps have read what `remainder` may overwrite
    else:
        norm = float_of(tl.max(magnitude_of(x).to(tl.int32)))
    norm = tl.minimum(norm, _LARGEST)
    norm = tl.where(norm < _SMALLEST, 0.0, norm)
    tl.store(norms + bucket, norm)
    s = tl.cast(levels, tl.float32)
    scale = tl.where(norm > 0, tl.math.div_rn(s, tl.where(norm > 0, norm, 1.0)), 0.0)
    random = random32(at.to(tl.uint32), uint32_of(low), uint32_of(high)) >> 16
    uniform = random.to(tl.int32).to(tl.float32) + 0.5
    y = x * scale + (s + uniform * (2.0**-16))
    code = tl.minimum(tl.maximum(y, 0.0), 2.0 * s).to(tl.int32)
    store_codes(out, tl.where(inside, code, 0).to(tl.int64), first, n, WIDTH)
    if KEEP:
        error = x - (code.to(tl.float32) - s) * tl.math.div_rn(norm, s)
        store_remainder(remainder, positions, at, inside, error, SPARSE)


@triton.jit
def _two_norm(values, residual, first, n, BUCKET: tl.constexpr, FUSED: tl.constexpr):
    """The 2-norm of a bucket, added up in the order of the host's kernel: value i to sum i & 15, then sum after sum."""
    lane = tl.arange(0, 16)
    sums = tl.zeros([16], tl.float64)
    end = tl.minimum(n, first + BUCKET)  # a bucket of 8 has half a row
    for row in range(0, BUCKET, 16):
        at = first + row + lane
        x = tl.load(values + at, mask=at < end, other=0.0)
        if FUSED:
            x += tl.load(residual + at, mask=at < end, other=0.0)
        sums += x.to(tl.float64) * x.to(tl.float64)
    total = tl.sum(tl.where(lane == 0, sums, 0.0))
    for i in tl.static_range(1, 16):
        total += tl.sum(tl.where(lane == i, sums, 0.0))
    return tl.minimum(tl.sqrt(total), 3.4028e38).to(tl.float32)


@triton.jit
def qsgd_decode(packed, norms, out, bad, n, levels, WIDTH: tl.constexpr, BUCKET: tl.constexpr):
    """The inverse of qsgd_encode. out: float32[n]; bad: int32[1], set to 1 if a code is out of range."""
    bucket = tl.program_id(0)
    first = bucket.to(tl.int64) * BUCKET
    at = bucket_offsets(BUCKET)
    inside = at < n
    code = load_codes(packed, first, n, WIDTH, BUCKET // 8).to(tl.int32)
    tl.atomic_max(bad, 1, mask=tl.max(tl.where(inside, code, 0)) > 2 * levels, sem="relaxed")
    s = tl.cast(levels, tl.float32)
    scale = tl.math.div_rn(tl.load(norms + bucket), s)
    tl.store(out + at, (code - levels).to(tl.float32) * scale, mask=inside)


def encode(source, norms, out, special, codec, key: tuple[int, int]) -> None:
    """See the kernel. source: a device_values.Source; special: None if the values are known to be finite; codec: the host's."""
    n = source.values.numel()
    launch(
        qsgd_encode, blocks(n, codec.bucket), *source.arrays(norms), norms, out, norms if special is None else special, n,
        codec.highest, *map(signed32, key), WIDTH=(2 * codec.highest).bit_length(), BUCKET=codec.bucket,
        TWO_NORM=codec.norm == "l2", **source.flags(), num_warps=max(1, min(8, codec.bucket // 256)),
    )  # fmt: skip


def decode(packed, norms, out, bad, levels: int, bucket: int) -> None:
    """See the kernel."""
    launch(
        qsgd_decode, norms.numel(), packed, norms, out, bad, out.numel(), levels, WIDTH=(2 * levels).bit_length(),
        BUCKET=bucket, num_warps=max(1, min(8, bucket // 256)),
    )  # fmt: skip
