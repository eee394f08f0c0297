"""One bit for each value, and the mean of the values of each sign in a bucket. The counterpart of grace_ext/kernels/signs.py."""

import triton
import triton.language as tl

from ._helpers import bucket_offsets, load_codes, load_source, store_codes, store_remainder
from ._launch import blocks, launch

MOST_BUCKET = 2048  # values that a program keeps in registers


@triton.jit
def onebit_encode(
    values, residual, positions, remainder, means, out, special, n,
    BUCKET: tl.constexpr, FUSED: tl.constexpr, KEEP: tl.constexpr, SPARSE: tl.constexpr
):  # fmt: skip
    """Encode float32[n], or values + residual if FUSED, as signs and means.

    means: float32[buckets, 2], of the values not below 0 and of those below; out: uint8[ceil(n / 8)]. For the rest see
    qsgd_encode.
    """
    bucket = tl.program_id(0)
    first = bucket.to(tl.int64) * BUCKET
    at = bucket_offsets(BUCKET)
    inside = at < n
    x = load_source(values, residual, at, inside, special, FUSED, SPARSE)
    below = (x < 0.0).to(tl.int32)
    lane = tl.arange(0, 16)
    positive, negative = tl.zeros([16], tl.float64), tl.zeros([16], tl.float64)
    end = tl.minimum(n, first + BUCKET)
    for row in range(0, BUCKET, 16):  # again, because the order of the additions is the host's
        place = first + row + lane
        y = tl.load(values + place, mask=place < end, other=0.0)
        if FUSED:
            y += tl.load(residual + place, mask=place < end, other=0.0)
        positive += tl.maximum(y.to(tl.float64), 0.0)
        negative += tl.minimum(y.to(tl.float64), 0.0)
    count = tl.sum(below)
    above = _mean(positive, (end - first).to(tl.int32) - count)
    under = _mean(negative, count)
    tl.debug_barrier()  # all warps have read what `remainder` may overwrite
    tl.store(means + 2 * bucket, above)
    tl.store(means + 2 * bucket + 1, under)
    store_codes(out, below.to(tl.int64), first, n, 1)
    if KEEP:
        store_remainder(remainder, positions, at, inside, x - tl.where(below > 0, under, above), SPARSE)


@triton.jit
def _mean(sums, count):
    """The sum over lanes, one after the other as on the host, divided by the count."""
    lane = tl.arange(0, 16)
    total = tl.sum(tl.where(lane == 0, sums, 0.0))
    for i in tl.static_range(1, 16):
        total += tl.sum(tl.where(lane == i, sums, 0.0))
    return tl.where(count > 0, total / tl.maximum(count, 1).to(tl.float64), 0.0).to(tl.float32)


@triton.jit
def onebit_decode(bits, means, out, n, BUCKET: tl.constexpr):
    """The inverse of onebit_encode. bits: uint8[ceil(n / 8)]; out: float32[n]."""
    bucket = tl.program_id(0)
    at = bucket_offsets(BUCKET)
    below = load_codes(bits, bucket.to(tl.int64) * BUCKET, n, 1, BUCKET // 8)
    above, under = tl.load(means + 2 * bucket), tl.load(means + 2 * bucket + 1)
    tl.store(out + at, tl.where(below > 0, under, above), mask=at < n)


def encode(source, means, out, special, bucket: int) -> None:
    """See the kernel. source: a device_values.Source."""
    n = source.values.numel()
    launch(
        onebit_encode, blocks(n, bucket), *source.arrays(means), means, out, means if special is None else special, n,
        BUCKET=bucket, **source.flags(), num_warps=max(1, min(8, bucket // 256)),
    )  # fmt: skip


def decode(bits, means, out, bucket: int) -> None:
    """See the kernel."""
    launch(
        onebit_decode, blocks(out.numel(), bucket), bits, means, out, out.numel(), BUCKET=bucket,
        num_warps=max(1, min(8, bucket // 256)),
    )  # fmt: skip
