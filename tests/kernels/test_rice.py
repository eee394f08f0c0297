"""Rice's kernels against their reference implementation. test_cpus.py runs this file for other CPUs, too."""

import numpy as np
import pytest
from support import reference_kernels
from support.guards import guarded
from support.kernel_inputs import ascending

from grace_ext import kernels
from grace_ext.kernels._helpers import MAX_SHIFT
from grace_ext.kernels.rice import quotient_room, remainder_bytes

RICE_SUPPORTS = {
    "one, first": ([0], 1),
    "one, last": ([999], 1000),
    "all": (range(500), 500),
    "dense": (ascending(3000, 2000), 3000),
    "sparse": (ascending(40000, 300), 40000),
    "clusters": ([*range(100, 160), *range(9000, 9100), 19999], 20000),
    "gaps around the flush": (np.cumsum([1 + g for g in (0, 54, 55, 56, 57, 48, 49, 50, 63, 64, 65, 112, 113, 500)]), 2000),
    "a long gap": ([3, 200_000], 200_001),
}


def rice_encode(indices, d, e):
    """The two streams, each from an array of exactly the promised size."""
    k = len(indices)
    low, low_intact = guarded(remainder_bytes(k, e) + 8)
    high, high_intact = guarded(quotient_room(d, k, e))
    bits = kernels.rice_encode(np.array(indices, np.uint32), e, low, high)
    assert k == 0 or kernels.quotient_bits(np.array(indices, np.uint32), e) == bits
    assert low_intact() and high_intact()
    return low[: remainder_bytes(k, e)].copy(), high[: (bits + 7) // 8].copy(), bits


@pytest.mark.parametrize("name", RICE_SUPPORTS)
@pytest.mark.parametrize("e", range(MAX_SHIFT + 1))
def test_rice(name, e):
    indices, d = RICE_SUPPORTS[name]
    low, high, bits = rice_encode(indices, d, e)
    expected = reference_kernels.rice(indices, e)
    assert (low.tobytes(), high.tobytes(), bits) == expected
    assert reference_kernels.unrice(*expected[:2], len(indices), e) == list(
        map(int, indices)
    )  # the reference implementations agree with each other
    out, intact = guarded(len(indices), np.uint32)
    assert kernels.rice_decode(low, high, d, e, out) == bits
    assert out.tolist() == list(map(int, indices)) and intact()


def test_rice_with_the_largest_gaps():
    indices, d = [2**31 - 3, 2**31 - 2], 2**31 - 1
    for e in (14, 20, 29, 30):
        low, high, bits = rice_encode(indices, d, e)
        assert (low.tobytes(), high.tobytes(), bits) == reference_kernels.rice(indices, e)
        out = np.empty(2, np.uint32)
        assert kernels.rice_decode(low, high, d, e, out) == bits and out.tolist() == indices


def test_rice_decode_refuses_what_is_not_k_indices_below_d():
    indices, d, e = ascending(5000, 100), 5000, 5
    low, high, _ = rice_encode(indices, d, e)
    last = int(indices[-1])
    assert kernels.rice_decode(low, high, last + 1, e, np.empty(100, np.uint32)) > 0
    assert kernels.rice_decode(low, high, last, e, np.empty(100, np.uint32)) == -1, "an index is d"
    assert kernels.rice_decode(low, high, d, e, np.empty(99, np.uint32)) == -1, "a one behind the last code"
    more = np.concatenate([low, np.zeros(1, np.uint8)])
    assert kernels.rice_decode(more, high, d, e, np.empty(101, np.uint32)) == -1, "too few codes"


@pytest.mark.parametrize("e", [0, 1, 5, 17, 30])
def test_rice_decode_survives_any_bytes(e):
    rng = np.random.default_rng(e)
    for _ in range(300):
        k = int(rng.integers(1, 40))
        d = int(rng.integers(k, 3000))
        low = rng.integers(0, 256, remainder_bytes(k, e), np.uint8)
        high = rng.integers(0, 256, int(rng.integers(0, quotient_room(d, k, e))), np.uint8)
        high &= rng.integers(0, 256, high.size, np.uint8)  # more zeros: gaps of a few bits
        out, intact = guarded(k, np.uint32)
        bits = kernels.rice_decode(low, high, d, e, out)
        assert intact()
        ones = sum(reference_kernels.to_bits(high))
        expected = reference_kernels.unrice(low, high, k, e) if ones >= k else None
        if ones == k and expected[-1] < d:
            assert out.tolist() == expected and bits > 0
        else:
            assert bits == -1
