"""QSGD's kernels against their reference implementation. test_cpus.py runs this file for other CPUs, too."""

import numpy as np
import pytest
from support import reference_kernels
from support.guards import guarded
from support.kernel_inputs import KEY, qsgd_values

from grace_ext import kernels
from grace_ext.kernels.qsgd import qsgd_decode_wide, qsgd_encode_wide


@pytest.mark.parametrize("kind", ["normal", "huge", "tiny", "zeros", "equal"])
@pytest.mark.parametrize("two_norm", [False, True])
@pytest.mark.parametrize("levels", [1, 2, 3, 5, 7, 15, 31, 63, 100, 127])
def test_qsgd(levels, two_norm, kind):
    bits = (2 * levels).bit_length()
    for bucket, k in ((8, 1), (8, 7), (8, 100), (16, 15), (16, 16), (16, 17), (512, 513), (1024, 700)):
        values = qsgd_values(kind, k)
        norms, codes = reference_kernels.qsgd(values, levels, bucket, *KEY, two_norm)
        for width in {bits, 8}:
            found_norms, norms_intact = guarded(-(-k // bucket), np.float32)
            packed, packed_intact = guarded(k * width // 8 + 8)
            kernels.qsgd_encode(values, levels, width, bucket, two_norm, *map(np.uint32, KEY), found_norms, packed)
            assert found_norms.tobytes() == norms.tobytes()
            assert packed[: -(-k * width // 8)].tobytes() == reference_kernels.pack(codes, width)
            assert norms_intact() and packed_intact()

            out, intact = guarded(k, np.float32)
            assert kernels.qsgd_decode(packed[: -(-k * width // 8)].copy(), levels, width, bucket, norms, out)
            assert out.tobytes() == reference_kernels.unqsgd(codes, levels, bucket, norms).tobytes() and intact()
            assert np.isfinite(out).all()
            assert (
                abs(out.astype(float) - values)
                <= np.repeat(norms, bucket)[:k].astype(float) / levels * (1 + 1e-5) + 2.0**-119
            ).all(), "an error of more than one level"


@pytest.mark.parametrize("kind", ["normal", "huge", "tiny", "zeros", "equal"])
@pytest.mark.parametrize("two_norm", [False, True])
@pytest.mark.parametrize("levels", [128, 256, 1000, 32767])
def test_qsgd_wide(levels, two_norm, kind):
    for bucket, k in ((8, 1), (8, 100), (16, 17), (1024, 700)):
        values = qsgd_values(kind, k)
        norms, codes = reference_kernels.qsgd_wide(values, levels, bucket, *KEY, two_norm)
        found_norms, found = np.empty_like(norms), np.empty(k, np.uint32)
        qsgd_encode_wide(values, levels, bucket, two_norm, *map(np.uint32, KEY), found_norms, found)
        assert found_norms.tobytes() == norms.tobytes() and found.tolist() == codes
        out, intact = guarded(k, np.float32)
        assert qsgd_decode_wide(found, levels, bucket, norms, out)
        assert out.tobytes() == reference_kernels.unqsgd(codes, levels, bucket, norms).tobytes() and intact()
        assert np.isfinite(out).all()
        width = np.repeat(norms, bucket)[:k].astype(float) / levels
        assert (abs(out.astype(float) - values) <= width * (1 + 1e-3) + 2.0**-110).all()
        found[k // 2] = 2 * levels + 1
        assert not qsgd_decode_wide(found, levels, bucket, norms, out)


def test_qsgd_never_rounds_past_the_highest_level():
    """Just below 1, the random number rounds 254 + u up to 255, for about 8 in a million."""
    k = 2_000_000
    norms, packed = np.empty(-(-k // 32768), np.float32), np.empty(k + 8, np.uint8)
    for norm in (1.0, 0.7, 3e-7):
        values = np.full(k, norm, np.float32)
        kernels.qsgd_encode(values, 127, 8, 32768, False, *map(np.uint32, KEY), norms, packed)
        assert (packed[:k] == 254).all() and (norms == np.float32(norm)).all()
    values = np.zeros(k, np.float32)  # one value in a bucket is its 2-norm
    values[::32768] = 0.7
    kernels.qsgd_encode(values, 127, 8, 32768, True, *map(np.uint32, KEY), norms, packed)
    assert (packed[:k:32768] == 254).all()


@pytest.mark.parametrize("levels", [1, 2, 3, 5, 63, 100, 127])
def test_qsgd_decode_refuses_a_code_that_no_level_has(levels):
    """One more than the highest code; level 127.00001 must not wrap into it either."""
    k, bits = 37, (2 * levels).bit_length()
    for bad in (0, 8, 36):
        codes = [2 * levels] * k
        norms = np.ones(3, np.float32)
        out = np.empty(k, np.float32)
        assert kernels.qsgd_decode(
            np.frombuffer(reference_kernels.pack(codes, bits), np.uint8), levels, bits, 16, norms, out
        )
        assert (out == 1).all()
        codes[bad] += 1
        packed = np.frombuffer(reference_kernels.pack(codes, bits), np.uint8)
        assert not kernels.qsgd_decode(packed, levels, bits, 16, norms, out)


@pytest.mark.parametrize("size", [0, 1, 7, 16, 33, 1000])
def test_max_magnitude(size):
    values = np.random.default_rng(size).standard_normal(size).astype(np.float32)
    for special in (None, -1e30, np.inf, -np.inf, np.nan):
        if special is not None and size:
            values[size * 2 // 3] = special
        assert kernels.max_magnitude(values) == max(reference_kernels.magnitudes(values).tolist(), default=0)
