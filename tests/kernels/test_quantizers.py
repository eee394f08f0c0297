"""The 16-bit conversions and the quantizers' kernels against numpy and reference implementations. test_cpus.py runs it, too."""

import numpy as np
import pytest
from support.guards import guarded, survives
from support.kernel_inputs import KEY, qsgd_values
from support.reference_kernels import quantizers as reference_quantizers

from grace_ext.kernels import half, minmax, natural, signs, ternary

pytestmark = pytest.mark.usefixtures("compiled")
FLT_MAX = np.finfo(np.float32).max


# 16 bits


def floats_around(bits, shift):
    """Finite float32 at, beside and half-way between the 16-bit numbers; bits: their upper or lower halves as float32."""
    found = [
        np.uint32(bits) + np.uint32(offset % 2**32)
        for offset in (-1, 0, 1, (1 << shift - 1) - 1, 1 << shift - 1, (1 << shift - 1) + 1)
    ]
    found.append(np.random.default_rng(0).integers(0, 2**32, 100_000, np.uint64).astype(np.uint32))
    values = np.concatenate(found).view(np.float32)
    return values[np.isfinite(values)]


HALVES = np.arange(2**16, dtype=np.uint16)


@pytest.mark.parametrize("limit", [65504, 1234.5, 2.0**-15])
def test_fp16_encode_is_numpys_cast(limit):
    values = floats_around(HALVES.view(np.float16).astype(np.float32).view(np.uint32), 13)
    out, intact = guarded(values.size, np.uint16)
    assert half.fp16_encode(values, np.float32(limit), out) == 0x7F7FFFFF
    expected = np.clip(values, -np.float32(limit), np.float32(limit)).astype(np.float16)
    assert out.tobytes() == expected.tobytes() and intact()


@pytest.mark.parametrize("size", [0, 1, 15, 16, 17, 100])
def test_fp16_encode_returns_the_largest_magnitude(size):
    for special in (-1e30, np.nan, -np.inf):
        values = np.linspace(-1, 2, size).astype(np.float32)
        values[size // 3 : size // 3 + 1] = special
        out, intact = guarded(size, np.uint16)
        magnitudes = values.view(np.uint32) & 0x7FFFFFFF
        assert half.fp16_encode(values, np.float32(65504), out) == max(magnitudes.tolist(), default=0) and intact()


def test_fp16_decode_is_numpys_cast():
    out, intact = guarded(2**16, np.float32)
    half.fp16_decode(HALVES, out)
    expected = HALVES.view(np.float16).astype(np.float32)
    assert np.array_equal(out, expected, equal_nan=True) and intact()
    assert np.array_equal(np.signbit(out), np.signbit(expected))


def test_halves_at_odd_addresses():
    odd = np.zeros(2 * HALVES.size + 1, np.uint8)[1:]
    odd[:] = HALVES.view(np.uint8)
    for decode in (half.fp16_decode, half.bf16_decode):
        even, out = np.empty(2**16, np.float32), np.empty(2**16, np.float32)
        decode(HALVES, even)
        decode(odd.view("<u2"), out)
        assert out.tobytes() == even.tobytes()


def test_bf16_encode():
    chosen = HALVES[::37]
    values = floats_around(chosen.astype(np.uint32) << 16, 16)[:20_000]
    values = np.concatenate([values, np.array([FLT_MAX, -FLT_MAX, 3.3895e38, 3.3961e38, 3.3962e38], np.float32)])
    out, intact = guarded(values.size, np.uint16)
    half.bf16_encode(values, out)
    assert out.tolist() == [reference_quantizers.bfloat16(x) for x in values] and intact()


def test_bf16_decode():
    finite = HALVES[(HALVES & 0x7F80) < 0x7F80]
    out, intact = guarded(finite.size, np.float32)
    half.bf16_decode(finite, out)
    assert out.tolist() == [reference_quantizers.un_bfloat16(int(bits)) for bits in finite] and intact()
    back, intact = guarded(finite.size, np.uint16)
    half.bf16_encode(out, back)
    assert np.array_equal(back, finite) and intact()


# Quantizers

KEYS = tuple(map(np.uint32, KEY))
KINDS = ["normal", "huge", "tiny", "zeros", "equal"]
SIZES = (1, 7, 15, 16, 17, 33, 100, 513, 700)


def buckets(k):
    """Sizes to cut k values into: the whole, and pieces with and without a rest."""
    return sorted({k, 8, 16, 24, 64, 512} if k > 8 else {k})


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("top", [1, 3, 7, 127, 255])
def test_minmax(top, kind):
    for k in SIZES:
        values = qsgd_values(kind, k)
        values[::3] *= np.float32(-1)  # zeros of both signs
        for chunk in (*buckets(k), 3):
            ranges, levels = reference_quantizers.minmax(values, chunk, top)
            found, ranges_intact = guarded(2 * len(ranges), np.float32)
            codes, intact = guarded(k)
            minmax.minmax_encode(values, chunk, top, found.reshape(-1, 2), codes)
            assert found.tobytes() == ranges.tobytes() and ranges_intact()
            assert codes.tolist() == levels and intact()
            out, intact = guarded(k, np.float32)
            minmax.minmax_decode(codes, chunk, top, ranges, out)
            assert out.tobytes() == reference_quantizers.un_minmax(levels, chunk, top, ranges).tobytes() and intact()
            assert np.isfinite(out).all()


@pytest.mark.parametrize("kind", KINDS)
def test_natural(kind):
    for k in (1, 17, 100):
        values = qsgd_values(kind, k)
        for lowest, count in ((1, 1), (1, 20), (1, 127), (120, 7), (125, 1), (128, 127), (254, 1)):
            codes, intact = guarded(k)
            natural.natural_encode(values, *map(np.uint32, (lowest, count)), *KEYS, codes)
            assert codes.tolist() == reference_quantizers.natural(values, lowest, count, *KEY) and intact()
            out, intact = guarded(k, np.float32)
            natural.natural_decode(codes, np.uint32(lowest), np.uint32(count), out)
            assert out.tolist() == reference_quantizers.un_natural(codes.tolist(), lowest, count) and intact()


def test_magnitude_range():
    found = {(): (0, 0), (0, -0.0): (0, 0), (0, -3, 2, 0.5): (0.5, 3), (3e38, -1e-45): (1e-45, 3e38)}
    for values, expected in found.items():
        bits = natural.magnitude_range(np.array(values, np.float32))
        assert np.array(bits, np.uint32).view(np.float32).tolist() == np.array(expected, np.float32).tolist()


@pytest.mark.parametrize("kind", KINDS)
def test_ternary_stochastic(kind):
    for k in SIZES:
        values = qsgd_values(kind, k)
        for bucket in buckets(k):
            norms, expected = reference_quantizers.ternary(values, bucket, *KEY)
            found, norms_intact = guarded(len(norms), np.float32)
            digits, intact = guarded(k)
            ternary.ternary_stochastic(values, bucket, *KEYS, found, digits)
            assert found.tobytes() == norms.tobytes() and norms_intact()
            assert digits.tolist() == expected and intact()
            out, intact = guarded(k, np.float32)
            ternary.ternary_decode(digits, bucket, norms, out)
            assert out.tolist() == [(digit - 1) * float(norms[i // bucket]) for i, digit in enumerate(expected)] and intact()


@pytest.mark.parametrize("kind", KINDS)
def test_ternary_nearest(kind):
    values = qsgd_values(kind, 700)
    for bound in (0.0, 0.375, abs(values).max(), 2.0):
        digits, intact = guarded(values.size)
        ternary.ternary_nearest(values, np.float32(bound).view(np.uint32), digits)
        sign = np.where(np.signbit(values), -1, 1)
        assert np.array_equal(digits, 1 + np.where(abs(values) >= np.float32(bound), sign, 0)) and intact()


@pytest.mark.parametrize("k", [*range(1, 27), 100, 1001])
def test_fives(k):
    digits = np.random.default_rng(k).integers(0, 3, k).astype(np.uint8)
    packed, intact = guarded(-(-k // 5))
    ternary.pack_fives(digits, packed)
    assert packed.tobytes() == reference_quantizers.fives(digits.tolist()) and intact()
    out, intact = guarded(5 * packed.size + 3)
    assert ternary.unpack_fives(packed, k, out) and np.array_equal(out[:k], digits) and intact()
    for at in {0, packed.size // 2, packed.size - 1}:
        for byte in (243, 255):
            bad = packed.copy()
            bad[at] = byte
            assert not ternary.unpack_fives(bad, k, out) and intact()
    if k % 5:
        packed[-1] += 1
        assert not ternary.unpack_fives(packed, k, out), "a digit behind the last is not 1"


def test_zero_runs():
    rng = np.random.default_rng(0)
    for run in (*range(45), 1000):
        for before, after in ((0, 0), (1, 0), (0, 1), (3, 2)):
            packed = np.concatenate([rng.integers(122, 243, before), np.full(run, 121), rng.integers(0, 121, after)])
            packed = packed.astype(np.uint8)
            folded, intact = guarded(packed.size)
            folded[:] = packed
            folded = folded[: ternary.fold_zeros(folded, packed.size)]
            assert folded.tobytes() == reference_quantizers.fold(packed.tobytes()) and intact()
            out, intact = guarded(packed.size)
            assert ternary.unfold_zeros(folded, out) and np.array_equal(out, packed) and intact()
            for size in {max(packed.size - 1, 0), packed.size + 1} - {packed.size}:
                out, intact = guarded(size)
                assert not ternary.unfold_zeros(folded, out) and intact()


@pytest.mark.parametrize("kind", KINDS)
def test_onebit(kind):
    for k in SIZES:
        values = qsgd_values(kind, k)
        values[0] = -0.0
        for bucket in buckets(k):
            means, bits = reference_quantizers.onebit(values, bucket)
            found, means_intact = guarded(means.size, np.float32)
            packed, intact = guarded(-(-k // 8))
            signs.onebit_encode(values, bucket, found.reshape(-1, 2), packed)
            assert found.tobytes() == means.tobytes() and means_intact()
            assert packed.tobytes() == np.packbits(bits, bitorder="little").tobytes() and intact()
            out, intact = guarded(k, np.float32)
            signs.onebit_decode(packed, bucket, means, out)
            assert out.tolist() == [means[i // bucket, bit] for i, bit in enumerate(bits)] and intact()


def inside(fence):
    """Every array ends where a page begins that may not be touched."""

    def room(size, dtype=np.uint8):
        return fence(np.zeros(size, dtype))

    for k in (*range(1, 34), 100, 513):
        values = fence(np.random.default_rng(k).standard_normal(k).astype(np.float32))
        halves, out = room(k, np.uint16), room(k, np.float32)
        half.fp16_encode(values, np.float32(65504), halves)
        half.fp16_decode(halves, out)
        half.bf16_encode(values, halves)
        half.bf16_decode(halves, out)
        natural.magnitude_range(values)
        for bucket in (k, 16):
            digits, pairs, count = room(k), room(2 * -(-k // bucket), np.float32), -(-k // bucket)
            minmax.minmax_encode(values, bucket, 255, pairs.reshape(-1, 2), digits)
            minmax.minmax_decode(digits, bucket, 255, pairs.reshape(-1, 2), out)
            natural.natural_encode(values, np.uint32(120), np.uint32(7), *KEYS, digits)
            natural.natural_decode(digits, np.uint32(120), np.uint32(7), out)
            bits = room(-(-k // 8))
            signs.onebit_encode(values, bucket, pairs.reshape(-1, 2), bits)
            signs.onebit_decode(bits, bucket, pairs.reshape(-1, 2), out)
            ternary.ternary_stochastic(values, bucket, *KEYS, fence(pairs[:count]), digits)
            ternary.ternary_decode(digits, bucket, fence(pairs[:count]), out)
            packed = room(-(-k // 5))
            ternary.pack_fives(digits, packed)
            ternary.unpack_fives(packed, k, room(5 * packed.size + 3))
            folded = fence(packed[: ternary.fold_zeros(fence(packed), packed.size)])
            ternary.unfold_zeros(folded, room(packed.size))
            ternary.unfold_zeros(fence(np.full(k, 255, np.uint8)), room(packed.size))
    return True


def test_kernels_stay_inside_their_arrays():
    assert survives(inside)
