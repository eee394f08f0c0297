"""Bit kernels, quantizer and sums against reference implementations. test_cpus.py runs it, too."""

import numpy as np
import pytest
from support import reference_kernels
from support.guards import guarded
from support.kernel_inputs import KEY, qsgd_values

from grace_ext import kernels
from grace_ext.kernels.qsgd import qsgd_decode_wide, qsgd_encode_wide
from grace_ext.kernels.rice import MAX_SHIFT, quotient_room, remainder_bytes


def ascending(d, k, seed=0):
    """uint32[k], strictly ascending, below d."""
    rng = np.random.default_rng(seed)
    return np.sort(rng.choice(d, k, replace=False)).astype(np.uint32)


# Rice

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


# Bits


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


# QSGD


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


# Sums


def shares_below(d, ranks, seed=0):
    """Overlapping sparse vectors, one of them empty, one in a single place, one dense at the start."""
    rng = np.random.default_rng(seed)
    sizes = [min(d, n) for n in (0, 1, 300, *(int(rng.integers(1, 2000)) for _ in range(ranks - 3)))]
    found = [(ascending(d, n, seed + n), rng.standard_normal(n).astype(np.float32)) for n in sizes]
    found[2] = (np.arange(sizes[2], dtype=np.uint32), found[2][1])
    return found


def run_sum_sparse(out, shares, weight):
    ends = np.cumsum([p.size for p, _ in shares])
    starts = np.concatenate([[0], ends[:-1]])
    kernels.sum_sparse(
        out,
        np.concatenate([p for p, _ in shares]),
        np.concatenate([v for _, v in shares]),
        starts.astype(np.int64),
        ends.astype(np.int64),
        np.float32(weight),
    )


@pytest.mark.parametrize("d", [1, 100, 32767, 32768, 32769, 100_000])
def test_sum_sparse(d):
    shares = shares_below(d, 5)
    out, intact = guarded(d, np.float32)
    run_sum_sparse(out, shares, 0.3)
    assert out.tobytes() == reference_kernels.sum_sparse(d, shares, 0.3).tobytes() and intact()


@pytest.mark.parametrize("offset", [0, 1, 3, 15])
@pytest.mark.parametrize("more", [-1, 0, 17])
def test_sum_sparse_streamed(offset, more):
    """From 4 Mi floats on, tiles are written past the caches, which needs 64-byte addresses: any other start must do."""
    d = 4 * 1024 * 1024 + more
    whole = np.full(d + 64, 7, np.float32)
    first = (-(whole.ctypes.data >> 2)) % 16 + offset
    out = whole[first : first + d]
    assert out.ctypes.data % 64 == 4 * offset
    shares = shares_below(d, 4) + [(np.array([0, 14, 15, 16, 32783, d - 1], np.uint32), np.arange(1, 7).astype(np.float32))]
    run_sum_sparse(out, shares, 0.7)
    assert out.tobytes() == reference_kernels.sum_sparse(d, shares, 0.7).tobytes()
    assert (whole[:first] == 7).all() and (whole[first + d :] == 7).all()


def test_add_dense():
    rng = np.random.default_rng(1)
    values, start = (rng.standard_normal(1003).astype(np.float32) for _ in range(2))
    out, intact = guarded(1003, np.float32)
    out[:] = start
    kernels.add_dense(out, values, np.float32(0.3))
    expected = [x + np.float32(0.3) * y for x, y in zip(start, values, strict=True)]
    assert out.tobytes() == np.array(expected, np.float32).tobytes() and intact()


def test_add_at_and_write_error():
    positions, rng = ascending(1000, 321), np.random.default_rng(1)
    values, decoded, start = (rng.standard_normal(n).astype(np.float32) for n in (321, 321, 1000))
    out, intact = guarded(1000, np.float32)
    out[:] = start
    kernels.add_at(out, positions, values, np.float32(0.3))
    expected = start.copy()
    expected[positions] += np.float32(0.3) * values
    assert out.tobytes() == expected.tobytes() and intact()
    kernels.write_error(out, positions, values, decoded)
    expected[positions] = values - decoded
    assert out.tobytes() == expected.tobytes() and intact()
