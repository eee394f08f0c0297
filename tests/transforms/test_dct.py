"""The DCT against the matrix of its definition, and what its place in the pipeline must keep."""

import math

import numpy as np
import pytest
from support.arrays import FLT_MAX, gauss, same_bits
from support.reference_decoder import dct as dct_decoder

import grace_ext
from grace_ext._util.rng import Stream
from grace_ext.kernels.dct import transform
from grace_ext.pipeline.container import parse
from grace_ext.pipeline.decoder import decode_sum
from grace_ext.sparsifiers.topk import select_largest_per_chunk
from grace_ext.transforms.base import Transform
from grace_ext.transforms.dct import DCT, factors

SIZES = [1 << e for e in range(1, 9)]


def definition(n):
    """float64[n, n]: orthonormal DCT-II, row k is the k-th cosine."""
    rows = np.array([[math.cos(math.pi * (2 * i + 1) * k / (2 * n)) for i in range(n)] for k in range(n)])
    rows *= math.sqrt(2 / n)
    rows[0] /= math.sqrt(2)
    return rows


@pytest.mark.parametrize("dims", [1, 2])
@pytest.mark.parametrize("n", SIZES)
def test_kernel_against_the_matrix(n, dims):
    given = gauss(3 * n * n, n).reshape(-1, n)
    cosines = definition(n)
    expected = given @ cosines.T
    if dims == 2:
        expected = np.concatenate([cosines @ expected[start : start + n] for start in range(0, 3 * n, n)])
    rows = given.copy()
    transform(rows, dims, False, factors(n))
    assert np.linalg.norm(rows - expected) < 3e-6 * np.linalg.norm(expected)
    inverse = dct_decoder.undo((n.bit_length() - 1, dims), rows.reshape(-1))
    transform(rows, dims, True, factors(n))
    assert same_bits(rows.reshape(-1), inverse), "the bits are part of the format"
    assert np.linalg.norm(rows - given) < 5e-6 * np.linalg.norm(given)


@pytest.mark.parametrize("rows", [1, 2, 63, 65])
def test_rows_that_are_no_square(rows):
    given = gauss(64 * rows).reshape(rows, 64)
    found = given.copy()
    transform(found, 1, False, factors(64))
    assert np.allclose(found, given @ definition(64).T, atol=1e-5)


@pytest.mark.parametrize("dims", [1, 2])
@pytest.mark.parametrize("size", [2, 8, 16, 64, 128])
def test_one_pass_does_what_the_steps_do(size, dims):
    """Cut, fill up and transform; and scatter, invert and subtract, in place and not."""
    codec = DCT(size, dims)
    for d in (1, size - 1, size**dims, 2 * size**2 + 5):
        dense = gauss(d, d)
        dense[0] = FLT_MAX
        padded = np.zeros(codec.domain(codec.parameters(), d), np.float32)
        padded[:d] = np.minimum(dense, np.float32(2.0**100))
        transform(padded.reshape(-1, size), dims, False, factors(size))
        coefficients = np.full(padded.size, np.nan, np.float32)
        codec.forward(dense, coefficients)
        assert same_bits(coefficients, padded)
        for support in (np.flatnonzero(np.arange(padded.size) % 3 == 1).astype(np.uint32), None):
            values = gauss(padded.size if support is None else support.size, 7)
            expected, found, given = np.empty(d, np.float32), np.empty(d, np.float32), dense.copy()
            Transform.subtract(codec, dense, support, values, expected)
            codec.subtract(dense, support, values, found)
            codec.subtract(given, support, values, given)
            assert same_bits(found, expected) and same_bits(given, expected)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("dims", [1, 2])
@pytest.mark.parametrize("size", [2, 4, 8, 16, 64, 128])
def test_selecting_in_one_pass_does_what_the_steps_do(size, dims, fused):
    """Add, cut, transform and select, chunk by chunk; also of chunks that are blank, negative zeros, or hold ties."""
    codec = DCT(size, dims)
    for d in (1, size - 1, size**dims, 5 * size**2 + 5):
        gradient, residual = gauss(d, d), gauss(d, d + 1) if fused else None
        gradient[0] = 2.0**101
        for start, value in ((2, 0.0), (3, -0.0), (4, 1.0)):
            gradient[start * size**2 : (start + 1) * size**2] = value
            if fused:
                residual[start * size**2 : (start + 1) * size**2] = value
        dense = gradient + residual if fused else gradient
        coefficients = np.empty(codec.domain(codec.parameters(), d), np.float32)
        codec.forward(dense, coefficients)
        for k in sorted({1, -(-codec.chunk // 50), codec.chunk}):
            out = np.empty_like(gradient)
            positions, found = (array.copy() for array in codec.largest_of_chunks(gradient, residual, out, k))
            expected, values = select_largest_per_chunk(coefficients, codec.chunk, k)
            assert np.array_equal(positions, expected) and same_bits(found, values)
            assert not fused or same_bits(out, dense)
        for bad in (np.nan, np.inf, -np.inf):
            gradient[d // 2] = bad
            assert codec.largest_of_chunks(gradient, residual, out, 1) is None


def test_chunks_without_coefficients_are_left_as_they_are():
    codec, dense = DCT(8, 2), gauss(640)
    support = np.arange(640, dtype=np.uint32)[64:192]
    values = np.repeat(np.array([0, 1], np.float32), 64) * gauss(128, 3)
    expected, found = np.empty_like(dense), np.empty_like(dense)
    Transform.subtract(codec, dense, support, values, expected)
    codec.subtract(dense, support, values, found)
    assert (
        same_bits(found, expected) and same_bits(found[:128], dense[:128]) and not same_bits(found[128:192], dense[128:192])
    )


def test_all_machines_have_the_same_factors():
    """Their distance from where float32 rounds the other way is far beyond what two mathematics libraries differ in."""
    for n in SIZES:
        exact = [1 / math.sqrt(n)] + [
            1 / (2 * math.cos(math.pi * (2 * i + 1) / (4 * h)))
            for h in (1 << e for e in range(n.bit_length() - 1))
            for i in range(h)
        ]
        for value, rounded in zip(exact, factors(n), strict=True):
            for neighbour in (np.nextafter(rounded, np.float32(0)), np.nextafter(rounded, np.float32(99))):
                middle = (float(rounded) + float(neighbour)) / 2
                assert abs(value - middle) > 1000 * np.spacing(value)


def test_smooth_gradients_need_few_coefficients():
    smooth = np.sin(np.linspace(0, 20, 40_000)).astype(np.float32)
    sent = grace_ext.decompress(grace_ext.compressor("dct:64:dims=1/topk:0.05").compress(smooth), smooth.size)
    without = grace_ext.decompress(grace_ext.compressor("topk:0.05").compress(smooth), smooth.size)
    assert np.linalg.norm(sent - smooth) < 0.02 * np.linalg.norm(smooth) < 0.9 * np.linalg.norm(without - smooth)


@pytest.mark.parametrize("spec", ["dct/topk:0.1/auto/qsgd:6", "dct:16:dims=1/topk:0.2/rice/raw"])
def test_sum_of_ranks(spec):
    c, d = grace_ext.compressor(spec), 9999
    blobs = [parse(c.compress(gauss(d, rank), rank=rank)) for rank in range(4)]
    out = np.empty(d, np.float32)
    decode_sum(blobs, out, 0.25)
    expected = np.mean([grace_ext.decompress(c.compress(gauss(d, rank), rank=rank), d) for rank in range(4)], 0)
    assert np.allclose(out, expected, atol=1e-5)


def test_values_beyond_the_range_stay_in_the_residual():
    gradient, residual = np.zeros(64, np.float32), np.zeros(64, np.float32)
    gradient[3] = FLT_MAX
    pending = np.empty_like(gradient)
    encoded = grace_ext.compressor("dct:8/dense/raw").encode_compensated(gradient, residual, pending, Stream())
    sent = grace_ext.decompress(encoded.blob, 64)
    assert np.isfinite(sent).all() and abs(sent[3] / 2.0**100 - 1) < 1e-5
    assert same_bits(pending, gradient - sent)


@pytest.mark.parametrize(
    ("options", "message"),
    [({"size": 3}, "dct: size=3; allowed: 2, 4"), ({"size": 512}, "size=512"), ({"dims": 3}, "dct: dims=3; allowed: 1, 2")],
)
def test_options(options, message):
    with pytest.raises(grace_ext.ConfigError, match=message):
        DCT(**options)
