"""The ternary kernels against their reference implementations. test_cpus.py runs this file for other CPUs, too."""

import numpy as np
import pytest
from support.guards import guarded
from support.kernel_inputs import KEY, KEYS, KINDS, SIZES, buckets, qsgd_values
from support.reference_kernels import quantizers as reference_quantizers

from grace_ext.kernels import ternary

pytestmark = pytest.mark.usefixtures("compiled")


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
