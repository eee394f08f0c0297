"""Packed bits and bitmaps against their reference implementations. test_cpus.py runs this file for other CPUs, too."""

import numpy as np
import pytest
from support import reference_kernels
from support.guards import guarded
from support.kernel_inputs import ascending

from grace_ext import kernels


@pytest.mark.parametrize("width", range(32))
def test_pack_bits(width):
    for count in (0, 1, 2, 7, 8, 9, 63, 64, 65):
        numbers = np.random.default_rng(count).integers(0, 1 << width, count).astype(np.uint32)
        numbers[-1:] = (1 << width) - 1
        packed, intact = guarded((count * width + 7) // 8)
        packed[:] = 0
        kernels.pack_bits(numbers, width, packed)
        assert packed.tobytes() == reference_kernels.pack(numbers, width) and intact()
        out, intact = guarded(count, np.uint32)
        kernels.unpack_bits(packed, width, out)
        assert out.tolist() == numbers.tolist() == reference_kernels.unpack(packed, width, count) and intact()


@pytest.mark.parametrize("d", [1, 7, 8, 9, 63, 64, 65, 4096, 5003])
def test_bitmap(d):
    for k in sorted({1, (d + 1) // 2, d}):
        indices = ascending(d, k)
        encoded, intact = guarded((d + 7) // 8)
        encoded[:] = 0
        kernels.bitmap_encode(indices, encoded)
        assert encoded.tobytes() == reference_kernels.bitmap(indices, d) and intact()
        out, intact = guarded(k, np.uint32)
        assert kernels.bitmap_decode(encoded, out) == k
        assert out.tolist() == indices.tolist() and intact()


def test_bitmap_decode_with_too_many_or_too_few_bits():
    encoded = np.array([0b1011, 0x80], np.uint8)
    out, intact = guarded(3, np.uint32)
    assert kernels.bitmap_decode(encoded, out) == -1 and intact()
    assert kernels.bitmap_decode(encoded, np.empty(5, np.uint32)) == 4
