"""The 16-bit conversions against numpy's. test_cpus.py runs this file for other CPUs, too."""

import numpy as np
import pytest
from support.guards import guarded
from support.reference_kernels import quantizers as reference_quantizers

from grace_ext.kernels import half

pytestmark = pytest.mark.usefixtures("compiled")


FLT_MAX = np.finfo(np.float32).max


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
