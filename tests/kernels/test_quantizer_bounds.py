"""The quantizers' kernels stay inside their arrays."""

import numpy as np
import pytest
from support.guards import survives
from support.kernel_inputs import KEYS

from grace_ext.kernels import half, minmax, natural, signs, ternary

pytestmark = pytest.mark.usefixtures("compiled")


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
        natural.nonzero_range(values)
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
