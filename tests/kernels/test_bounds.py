"""Kernels stay inside their arrays: each array ends where a page begins that the process may not touch.

A read or write too far kills the process, so the calls run in a forked child. test_cpus.py runs this file too.
"""

import ctypes
import faulthandler

import numpy as np
import pytest
from support import codec_conformance, reference_kernels
from support.guards import survives

from grace_ext import kernels
from grace_ext._util.rng import Stream
from grace_ext.kernels._ranks import BINS
from grace_ext.kernels.level_blocks import choose_classes, class_sizes, merge_blocks, split_blocks
from grace_ext.kernels.level_signs import mirror_levels, signs_saved, unmirror_levels
from grace_ext.kernels.local_adamw import local_adamw_step
from grace_ext.kernels.rice import quotient_room, remainder_bytes
from grace_ext.kernels.topk import candidate_room, sample_room
from grace_ext.transforms.dct import DCT
from grace_ext.value._levels import ENTROPY, pack_levels, unpack_levels
from grace_ext.value.lloyd import Lloyd

pytestmark = pytest.mark.usefixtures("compiled")


def one_too_far(fence):
    faulthandler.disable()  # this crash is meant
    array = fence(np.zeros(8, np.uint8))
    return ctypes.c_uint8.from_address(array.ctypes.data + 8).value == 0


def test_the_fence_holds():
    assert not survives(one_too_far)
    assert survives(lambda fence: fence(np.arange(8)).sum() == 28)


def rice(fence, e):
    good = True
    for k in (*range(1, 40), 300):
        indices = np.cumsum(np.random.default_rng(k).integers(1, 1 + min(3 << e, 10**6), k)).astype(np.uint32)
        d = int(indices[-1]) + 1
        low, high = fence(np.zeros(remainder_bytes(k, e) + 8, np.uint8)), fence(np.zeros(quotient_room(d, k, e), np.uint8))
        bits = kernels.rice_encode(fence(indices), e, low, high)
        streams = fence(low[: remainder_bytes(k, e)]), fence(high[: (bits + 7) // 8])
        out = fence(np.zeros(k, np.uint32))
        good &= kernels.rice_decode(*streams, d, e, out) == bits and np.array_equal(out, indices)
        for junk in (0, 255, 1):
            kernels.rice_decode(*(fence(np.full(stream.size, junk, np.uint8)) for stream in streams), d, e, out)
    return good


@pytest.mark.parametrize("e", [0, 1, 2, 3, 5, 7, 8, 13, 16, 23, 30])
def test_rice(e):
    assert survives(rice, e)


def qsgd(fence, bits):
    good = True
    for k in (*range(1, 34), 100, 513):
        values = np.random.default_rng(k).standard_normal(k).astype(np.float32)
        norms, packed = fence(np.zeros(-(-k // 16), np.float32)), fence(np.zeros(k * bits // 8 + 8, np.uint8))
        levels = (1 << bits - 1) - 1
        kernels.qsgd_encode(fence(values), levels, bits, 16, k % 2 == 0, np.uint32(1), np.uint32(2), norms, packed)
        out = fence(np.zeros(k, np.float32))
        good &= kernels.qsgd_decode(fence(packed[: -(-k * bits // 8)]), levels, bits, 16, norms, out)
        good &= kernels.max_magnitude(fence(values)) == reference_kernels.magnitudes(values).max()
    return good


@pytest.mark.parametrize("bits", range(2, 9))
def test_qsgd(bits):
    assert survives(qsgd, bits)


def levels(fence, entropy):
    """Whole payloads, whose last part ends at the fence; then damaged ones, which may be refused."""
    good = True
    for k in (*range(1, 18), 63, 64, 65, 500):
        for alphabet, width in ((2, 1), (7, 1), (200, 20), (256, 90)):
            drawn = np.clip(np.random.default_rng(k).standard_normal(k) * width + alphabet / 2, 0, alphabet - 1)
            packed = pack_levels(fence(drawn.astype(np.uint8)), alphabet, entropy)
            out = fence(np.zeros(k, np.uint8))
            unpack_levels(fence(packed), alphabet, out)
            good &= np.array_equal(out, drawn.astype(np.uint8))
            for bad in codec_conformance.mutations(packed, seed=k, count=20):
                codec_conformance.refused_or(lambda data, into, n=alphabet: unpack_levels(data, n, into), fence(bad), out)
    return good


@pytest.mark.parametrize("entropy", ENTROPY)
def test_levels(entropy):
    assert survives(levels, entropy)


def level_blocks(fence):
    good = True
    for k in (*range(1, 18), 63, 64, 65, 1000, 4224):
        scale = np.repeat(np.arange(-(-k // 64)) % 3 * 40 + 2.0, 64)[:k]
        drawn = fence(np.clip(np.random.default_rng(k).standard_normal(k) * scale + 127, 0, 255).astype(np.uint8))
        numbers, sizes = fence(np.zeros(-(-k // 64), np.uint8)), fence(np.zeros(8, np.int64))
        choose_classes(drawn, 256, numbers, sizes)
        used = int(numbers.max()) + 1
        again, sizes = fence(np.zeros(used, np.int64)), fence(sizes[:used])
        good &= class_sizes(numbers, k, again) and np.array_equal(again, sizes)
        parts, out = fence(np.zeros(k, np.uint8)), fence(np.zeros(k, np.uint8))
        split_blocks(drawn, numbers, sizes, parts)
        merge_blocks(parts, numbers, sizes, out)
        good &= np.array_equal(out, drawn)
    packed = pack_levels(drawn, 256, "ans")
    for bad in codec_conformance.mutations(packed, count=200):
        codec_conformance.refused_or(lambda data, into: unpack_levels(data, 256, into), fence(bad), out)
    return good and packed[0] == 4


def level_signs(fence):
    good = True
    for k in (1, 2, 63, 64, 65, 1000):
        drawn, out = (
            fence(np.sort(np.random.default_rng(k).integers(0, 256, k)).astype(np.uint8)),
            fence(np.zeros(k, np.uint8)),
        )
        signs_saved(drawn, 127)
        mirror_levels(drawn, 127, out)
        unmirror_levels(out, 127)
        good &= np.array_equal(out, drawn)
    packed = pack_levels(fence(np.repeat(np.arange(1000) % 2 * 100 + 77, 8).astype(np.uint8)), 256, "ans")
    for bad in codec_conformance.mutations(packed, count=200):
        codec_conformance.refused_or(
            lambda data, into: unpack_levels(data, 256, into), fence(bad), fence(np.zeros(8000, np.uint8))
        )
    return good and packed[0] == 5


def test_level_signs():
    assert survives(level_signs)


def test_level_blocks():
    assert survives(level_blocks)


def lloyd(fence):
    good = True
    for k in (1, 15, 16, 17, 300):
        for error in (0.01, 0.1, 0.5):
            values, out = np.random.default_rng(k).standard_t(2, k).astype(np.float32), fence(np.zeros(k, np.float32))
            payload, _ = Lloyd(error).encode(fence(values), Stream())
            Lloyd.decode(fence(payload), out)
            good &= np.isfinite(out).all()
            for bad in codec_conformance.mutations(payload, seed=k):
                codec_conformance.refused_or(Lloyd.decode, fence(bad), out)
    return good


def test_lloyd():
    assert survives(lloyd)


def bits(fence):
    good = True
    for count in (*range(1, 20), 64, 65):
        for width in range(0, 32, 3):
            numbers = np.full(count, (1 << width) - 1, np.uint32)
            packed, out = fence(np.zeros((count * width + 7) // 8, np.uint8)), fence(np.zeros(count, np.uint32))
            kernels.pack_bits(fence(numbers), width, packed)
            kernels.unpack_bits(packed, width, out)
            good &= np.array_equal(out, numbers)
        indices, bitmap = np.arange(count, dtype=np.uint32), fence(np.zeros((count + 7) // 8, np.uint8))
        kernels.bitmap_encode(fence(indices), bitmap)
        good &= kernels.bitmap_decode(bitmap, fence(np.zeros(count, np.uint32))) == count
    return good


def test_bits():
    assert survives(bits)


def topk(fence, d):
    values = np.random.default_rng(d).standard_normal(d).astype(np.float32)
    good = True
    for k in sorted({1, max(1, d // 10), d}):
        for fused in (False, True):
            room = [fence(np.zeros(candidate_room(d, k), np.uint32)) for _ in range(3)]
            gradient, residual = (fence(np.float32(0.5) * values) for _ in range(2))
            n = kernels.select_topk(
                gradient if fused else fence(values),
                residual,
                fence(np.zeros(d, np.float32)),
                fused,
                k,
                *room,
                fence(np.zeros(sample_room(d), np.uint32)),
                fence(np.zeros(BINS, np.int64)),
            )
            good &= np.array_equal(room[0][:n], reference_kernels.topk(values, k))
    return good


@pytest.mark.parametrize("d", [1, 15, 16, 17, 31, 100, 1023, 4095, 4096, 4097, 4111, 50_001])
def test_topk(d):
    assert survives(topk, d)


def sums(fence, d):
    positions = np.arange(max(0, d - 40_000), d, dtype=np.uint32)
    values = fence(np.ones(positions.size, np.float32))
    out = fence(np.zeros(d, np.float32))
    kernels.add_dense(out, fence(np.zeros(d, np.float32)), np.float32(1))
    kernels.add_at(out, fence(positions), values, np.float32(1))
    kernels.write_error(out, fence(positions), values, fence(np.zeros(positions.size, np.float32)))

    def of_one_rank():
        return fence(positions), values, fence(np.zeros(1, np.int64)), fence(np.array([positions.size], np.int64))

    at, found = fence(np.zeros(positions.size, np.uint32)), fence(np.zeros(positions.size, np.float32))
    kernels.sum_sparse_at(d, *of_one_rank(), np.float32(1), at, found)
    kernels.sum_sparse(out, *of_one_rank(), np.float32(1))
    summed = out.sum(dtype=np.float64)
    kernels.mean_sparse(out, *of_one_rank(), fence(np.full(1, 0.5, np.float32)))
    return summed == out.sum(dtype=np.float64) == positions.size


@pytest.mark.parametrize("d", [1, 32768, 32769, 4 * 1024 * 1024, 4 * 1024 * 1024 + 5])
def test_sums(d):
    assert survives(sums, d)


def cosines(fence, size, dims):
    codec, good = DCT(size, dims), True
    for d in (1, size * size - 1, size * size, 3 * size * size + 7):
        gradient, residual = (np.random.default_rng(seed).standard_normal(d).astype(np.float32) for seed in (1, 2))
        out, coefficients = fence(np.zeros(d, np.float32)), fence(np.zeros(codec.domain(codec.parameters(), d), np.float32))
        found = codec.largest_of_chunks(fence(gradient), fence(residual), out, 1)
        codec.forward(fence(gradient + residual), coefficients)
        good &= np.array_equal(coefficients[found[0]], found[1])
        codec.subtract(out, fence(found[0].copy()), fence(found[1].copy()), out)
        codec.inverse(codec.parameters(), coefficients)
        good &= np.allclose(coefficients[:d], gradient + residual, atol=1e-4)
    return good


@pytest.mark.parametrize("dims", [1, 2])
@pytest.mark.parametrize("size", [2, 4, 8, 32, 64, 128])
def test_cosines(size, dims):
    assert survives(cosines, size, dims)


def adamw(fence, rows, columns):
    step = [fence(np.ones(size, np.float32)) for size in (*[rows * columns] * 4, rows, columns)]
    local_adamw_step(*step, *np.float32([0.1, 0.4, 0.01, 1, 1, 1, -0.5, 1]))
    return np.allclose(step[0], 0.75)


@pytest.mark.parametrize("rows, columns", [(1, 1), (3, 63), (2, 64), (5, 65), (1, 400)])
def test_local_adamw(rows, columns):
    assert survives(adamw, rows, columns)
