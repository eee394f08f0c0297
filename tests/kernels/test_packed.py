"""States in 8 and 16 bits: the scales, rounding to neighbors, its mean, and that packing again changes nothing.

test_cpus.py runs this file for other CPUs, too.
"""

import numpy as np
import pytest
from support.guards import guarded

from grace_ext.kernels import packed
from grace_ext.kernels.half import bf16_decode

pytestmark = pytest.mark.usefixtures("compiled")

BLOCK = packed.BLOCK


def pack8(values):
    """Returns (codes, scales, the unpacked values)."""
    codes, codes_intact = guarded(values.size, np.int8)
    scales, scales_intact = guarded(-(-values.size // BLOCK), np.float32)
    out, out_intact = guarded(values.size, np.float32)
    packed.pack8(values, codes, scales)
    packed.unpack8(codes, scales, out)
    assert codes_intact() and scales_intact() and out_intact()
    return codes, scales, out


def pack16(values):
    halves, halves_intact = guarded(values.size, np.uint16)
    out, out_intact = guarded(values.size, np.float32)
    packed.pack16(values, halves)
    bf16_decode(halves, out)
    assert halves_intact() and out_intact()
    return halves, out


def heavy_tailed(size, seed=0):
    generator = np.random.default_rng(seed)
    return (generator.standard_normal(size) * np.exp(4 * generator.standard_normal(size))).astype(np.float32)


@pytest.mark.parametrize("size", [0, 1, 31, BLOCK - 1, BLOCK, BLOCK + 1, 10 * BLOCK + 7])
def test_8_bits(size):
    values = heavy_tailed(size)
    codes, scales, out = pack8(values)
    for block, scale in enumerate(scales.tolist()):
        part = slice(block * BLOCK, (block + 1) * BLOCK)
        largest = np.abs(values[part]).max()
        assert np.log2(scale).is_integer() and 127 * scale >= largest > 127 * scale / 2
        assert np.abs(codes[part]).max() <= 127
        exact = values[part].astype(np.float64) / scale
        assert ((codes[part] == np.floor(exact)) | (codes[part] == np.ceil(exact))).all()
        assert np.array_equal(out[part], codes[part] * np.float32(scale))


@pytest.mark.parametrize("size", [0, 1, 15, 16, 17, 1000])
def test_16_bits(size):
    values = heavy_tailed(size)
    halves, out = pack16(values)
    down = values.view(np.uint32) >> 16
    assert ((halves == down) | ((halves == down + 1) & ((values.view(np.uint32) & 0xFFFF) > 0))).all()
    assert np.array_equal(out.view(np.uint32), halves.astype(np.uint32) << 16)


@pytest.mark.parametrize("pack", [lambda values: pack8(values)[2], lambda values: pack16(values)[1]])
def test_packing_again_changes_nothing(pack):
    once = pack(heavy_tailed(50 * BLOCK + 3))
    assert np.array_equal(pack(once), once)


def test_the_mean_is_exact():
    """A magnitude of a tenth of a step is kept in a tenth of the cases; 127 steps are what the largest value has."""
    size = 400 * BLOCK
    values = np.full(size, 0.1, np.float32)
    values[::BLOCK] = 127
    small = np.arange(size) % BLOCK != 0
    out = pack8(values + 1e-6 * np.random.default_rng(0).random(size, np.float32))[2][small]
    assert set(out.tolist()) == {0.0, 1.0} and out.mean() == pytest.approx(0.1, abs=0.005)
    near = np.float32(1) + np.float32(0.1 / 128)  # a step of bfloat16 there is 1 / 128
    values = np.full(size, near, np.float32) + np.arange(size, dtype=np.float32) % 16 * np.float32(2**-23)
    assert pack16(values)[1].mean() == pytest.approx(near, abs=0.005 / 128)
    assert pack8(-values)[2].mean() == pytest.approx(-near, abs=0.005 / 64)


def test_values_at_the_edges():
    for large in (np.finfo(np.float32).max, 127.0, np.nextafter(np.float32(127), np.float32(128)), 2.0**-119):
        values = np.array([large, -large, large / 2], np.float32)
        np.testing.assert_allclose(pack8(values)[2], values, rtol=1 / 63)
        np.testing.assert_allclose(pack16(values)[1], values, rtol=2**-7)
        assert np.isfinite(pack16(values)[1]).all()
    assert not pack8(np.array([2.0**-121, 1e-45, 0.0], np.float32))[2].any(), "too small for a scale"
    for special in (np.nan, np.inf, -np.inf):
        values = np.ones(BLOCK + 1, np.float32)
        values[3] = special
        _, scales, out = pack8(values)
        assert scales[0] == 0 and not out[:BLOCK].any() and out[BLOCK] == 1
        pack16(values)  # stays inside its arrays
