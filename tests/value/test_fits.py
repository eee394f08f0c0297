"""Curve fits of sorted values and the quantile sketch: kernels against reference implementations, errors against known ones."""

import functools
import math
import struct

import numpy as np
import pytest
from support import codec_conformance, reference_kernels
from support.arrays import FLT_MAX, gauss, same_bits
from support.guards import survives
from support.reference_decoder import fits as fits_decoder
from support.reference_kernels import fits as reference_fits

from grace_ext import ContainerError
from grace_ext.kernels.dexp import _exp, evaluate_exponentials, fit_exponentials
from grace_ext.kernels.polyfit import evaluate_segments, find_knots, fit_segments
from grace_ext.kernels.sketch import look_up, sketch_encode
from grace_ext.kernels.sort import argsort_bits
from grace_ext.pipeline import spec
from grace_ext.value.dexp import DoubleExponential
from grace_ext.value.polyfit import PolyFit
from grace_ext.value.sketchml import SketchML

CASES = {name: values for name, values in codec_conformance.gradients().items() if values.size}


def value(text):
    return spec.parse_stage("value", text)


def round_trip(codec, values):
    """float32[k] as receivers get them, in the order of values; the payload's length."""
    payload, order = codec.encode(values, codec_conformance.STREAM)
    out = np.full(values.size, np.nan, np.float32)
    codec.decode(payload, out)
    if order is not None:
        out[order] = out.copy()
    return out, payload.size


def error(values, decoded):
    """Relative L2 error."""
    return np.linalg.norm(values.astype(float) - decoded) / np.linalg.norm(values.astype(float))


@functools.cache
def heavy(k=10_000):
    """The top 1 % of a normal times a lognormal variable, as in the notes' measurements."""
    rng = np.random.default_rng(0)
    gradient = (rng.standard_normal(100 * k) * np.exp(rng.standard_normal(100 * k))).astype(np.float32)
    return gradient[reference_kernels.topk(gradient, k)]


# Sort


def sort(values, fence=lambda array: array):
    k = values.size
    order, ordered = fence(np.zeros(k, np.uint32)), fence(np.zeros(k, np.float32))
    count = argsort_bits(fence(values), fence(np.zeros(k, np.uint64)), fence(np.zeros(k, np.uint64)), order, ordered)
    return order, ordered, count


@pytest.mark.parametrize("name", CASES)
def test_argsort(name):
    values = CASES[name]
    order, ordered, count = sort(values)
    assert np.array_equal(order, np.argsort(values.view(np.uint32), kind="stable"))
    assert same_bits(ordered, values[order])
    assert count == np.count_nonzero(~np.signbit(values))


def test_argsort_of_keys_that_differ_in_one_digit():
    """A digit that is the same everywhere is left out."""
    for shift in (0, 11, 22, 5, 17):
        bits = np.random.default_rng(shift).integers(0, 1 << 10, 5000).astype(np.uint32) << np.uint32(shift)
        assert np.array_equal(sort(bits.view(np.float32))[0], np.argsort(bits, kind="stable"))


# Polynomials


def pieces(codec, values):
    """What encode sent: [(coefficients, low edge, high edge, magnitudes of the segment)]."""
    payload, order = codec.encode(values, codec_conformance.STREAM)
    data = payload.tobytes()
    degree, *counts = data[:3]
    ordered, at, edge_at, found = np.abs(values[order]), 3, 3 + 4 * sum(counts), []
    coefficients_at = edge_at + 4 * sum(count + 1 for count in counts if count)
    start = 0
    for count in counts:
        for _ in range(count):
            (length,) = struct.unpack_from("<I", data, at)
            c = np.frombuffer(data, "<f4", degree + 1, coefficients_at)
            found.append((c, *struct.unpack_from("<2f", data, edge_at), ordered[start : start + length]))
            start, at, edge_at, coefficients_at = start + length, at + 4, edge_at + 4, coefficients_at + 4 * (degree + 1)
        edge_at += 4 * (count > 0)
    return found


@pytest.mark.parametrize("name", CASES)
def test_knots(name):
    magnitudes = np.sort(np.abs(CASES[name]))[-3000:]
    for least, most in ((6, 5), (1, 3), (4, 1)):
        ends = np.full(most, -1, np.int64)
        count = find_knots(magnitudes, least, ends)
        assert ends[:count].tolist() == reference_fits.knots(magnitudes, least, most)


def test_the_knot_is_where_the_chord_is_furthest():
    x = np.arange(1000)
    values = np.where(x < 700, 0.001 * x, 0.7 + 0.1 * (x - 700)).astype(np.float32)
    ends = np.empty(2, np.int64)
    assert find_knots(values, 6, ends) == 2 and abs(ends[0] - 700) <= 1


@pytest.mark.parametrize("text", ["polyfit", "polyfit:2:segments=3", "polyfit:9", "polyfit:0"])
@pytest.mark.parametrize("name", CASES)
def test_least_squares_of_every_segment(name, text):
    codec = value(text)
    for c, low, high, magnitudes in pieces(codec, CASES[name]):
        assert low == magnitudes[0] and high >= magnitudes[-1]
        fitted, ends = np.empty((1, c.size), np.float32), np.array([magnitudes.size])
        fit_segments(magnitudes, ends, fitted)
        assert same_bits(fitted[0], c)
        out = np.empty_like(magnitudes)
        evaluate_segments(fitted, magnitudes[[0, -1]], ends, False, out)
        span = float(magnitudes[-1]) - float(magnitudes[0])
        expected = reference_fits.least_squares(magnitudes, codec.degree)
        assert np.allclose(out, expected, rtol=2e-7, atol=3e-6 * span + 1e-45)


@pytest.mark.parametrize("name", CASES)
def test_evaluation_is_exactly_the_reference_decoders(name):
    for codec in (PolyFit(), PolyFit(9, 40)):
        payload, _ = codec.encode(CASES[name], codec_conformance.STREAM)
        out = np.empty_like(CASES[name])
        codec.decode(payload, out)
        assert np.array_equal(out, np.array(fits_decoder.polyfit(payload.tobytes(), out.size), np.float32))


def test_decoded_values_keep_sign_and_segment():
    values = heavy()
    decoded, _ = round_trip(PolyFit(), values)
    assert np.array_equal(np.signbit(decoded), np.signbit(values))
    assert np.abs(decoded).min() >= np.abs(values).min() and np.abs(decoded).max() <= np.abs(values).max()


def test_wild_coefficients_stay_between_the_edges():
    rng = np.random.default_rng(0)
    for n in (1, 2, 5, 700):
        for _ in range(20):
            c = rng.choice(np.array([0, 1, -1, FLT_MAX, -FLT_MAX, 1e-45], np.float32), (1, 10))
            edges = np.sort(rng.choice(np.array([0, 1e-45, 1, FLT_MAX], np.float32), 2))
            out = np.full(n, np.nan, np.float32)
            evaluate_segments(c, edges, np.array([n]), False, out)
            assert (out >= edges[0]).all() and (out <= edges[1]).all()
            assert out.tolist() == reference_fits.segment(c[0], *edges, n)


def test_polyfit_error():
    """The notes' Legendre fit had .0085 on such values; 18 bits of order and next to nothing else."""
    values = heavy()
    decoded, size = round_trip(PolyFit(), values)
    assert error(values, decoded) < 0.0085 and size * 8 / values.size < 0.4
    assert error(values, round_trip(PolyFit(segments=1), values)[0]) > 0.05


def test_few_values_are_exact():
    """As many coefficients as values: only their rounding to float32 is left."""
    for k in range(1, 7):
        values = gauss(k, k)
        assert np.allclose(round_trip(PolyFit(), values)[0], values, rtol=1e-5, atol=1e-6)


def forged(degree=1, counts=(1, 0), lengths=(3,), edges=(1, 2), c=(0, 0)):
    numbers = struct.pack(f"<{len(lengths)}I{len(edges)}f{len(c)}f", *lengths, *edges, *c)
    return np.frombuffer(bytes([degree, *counts]) + numbers, np.uint8)


@pytest.mark.parametrize(
    "message, payload",
    [
        ("out of range", np.zeros(2, np.uint8)),
        ("out of range", forged(degree=10)),
        ("bytes for 1 segments", forged()[:-1]),
        ("bytes for 2 segments", forged(counts=(1, 1))),
        ("bytes for 0 segments", forged(counts=(0, 0))),
        ("do not hold 3 values", forged(lengths=(2,))),
        ("do not hold 3 values", forged(counts=(0, 0), lengths=(), edges=(), c=())),
        ("do not hold 3 values", forged(counts=(2, 0), lengths=(3, 0), edges=(1, 2, 3), c=(0,) * 4)),
        ("coefficient is not finite", forged(c=(0, float("nan")))),
        ("coefficient is not finite", forged(c=(float("inf"), 0))),
        ("not finite and ascending", forged(edges=(2, 1))),
        ("not finite and ascending", forged(edges=(-1, 1))),
        ("not finite and ascending", forged(edges=(1, float("inf")))),
        ("not finite and ascending", forged(edges=(float("nan"), 1))),
    ],
)
def test_polyfit_refuses(message, payload):
    out = np.zeros(3, np.float32)
    PolyFit.decode(forged(), out)
    assert out.tolist() == [1, 1, 1]
    with pytest.raises(ContainerError, match=message):
        PolyFit.decode(payload, out)


# Exponentials


def fit(magnitudes):
    """(parameters b, d, a, c; the decoded magnitudes)."""
    magnitudes = np.sort(magnitudes).astype(np.float32)
    parameters, out = np.empty(4, np.float32), np.empty_like(magnitudes)
    fit_exponentials(magnitudes, parameters)
    evaluate_exponentials(parameters, magnitudes[0], magnitudes[-1], False, out)
    return parameters, out


def test_exp():
    """Near the C library's, and the same bits as the reference implementation's."""
    for t in (0.0, -1e-300, -1e-9, -0.1, -0.5, -1.0, -10.0, -87.3, -699.0):
        assert abs(_exp(t) / math.exp(t) - 1) < (1e-12 if t > -100 else 2e-10)
        assert _exp(t) == reference_fits.exp(t)
    assert _exp(-1e30) == _exp(-700.0) < 1e-303


def test_two_exponentials_are_found_again():
    for b, d, a, c in ((0.1, -5.0, 1.0, -0.5), (3.0, 0.25, 0.5, 0.5), (200.0, 1.0, 0.3, 0.7)):
        x = np.linspace(0, 1, 20_000)
        y = a * np.exp(b * (x - 1)) + c * (np.exp(d * (x - 1)) if d > 0 else np.exp(d * x))
        assert (np.diff(y) > 0).all()
        parameters, out = fit(1e-3 * y)
        assert np.allclose(parameters, [b, d, a / y[-1], c / y[-1]], rtol=0.02)
        assert error(1e-3 * y, out) < 2e-4


@pytest.mark.parametrize("name", ["heavy", "513 elements", "4096 elements"])
def test_rates_and_amplitudes_are_numpys(name):
    magnitudes = np.sort(np.abs(heavy(3000) if name == "heavy" else CASES[name]))
    parameters, out = fit(magnitudes)
    scaled = magnitudes.astype(float) / magnitudes[-1]
    b, d = reference_fits.rates(scaled)
    assert np.allclose(parameters[:2], [b, d], rtol=1e-4, atol=1e-4)
    expected = np.clip(reference_fits.amplitudes(scaled, float(parameters[0]), float(parameters[1])), scaled[0], 1)
    assert np.allclose(out / magnitudes[-1], expected, atol=2e-6)


@pytest.mark.parametrize(
    "magnitudes, bound",
    [
        (np.full(700, 3.0), 0),
        (np.zeros(5), 0),
        (np.array([2.5]), 0),
        (np.array([1.0, 2.0]), 1e-6),
        (np.arange(1000.0), 0.02),
        (np.arange(1.0, 4.0), 0.02),
        (np.append(np.zeros(4999), 1.0), 0.02),
        (np.append(np.full(9, 1.0), 1e30), 0.02),
        (np.sqrt(np.arange(3000.0)), 0.1),
        (np.repeat([1.0, 2.0], 300), 0.2),
        (np.full(20, FLT_MAX), 0),
        (np.full(20, 1e-45), 0),
    ],
)
def test_degenerate_fits(magnitudes, bound):
    """Constants, lines, single peaks, steps: no two rates to be found, or complex ones."""
    magnitudes = magnitudes.astype(np.float32)
    assert error(magnitudes, fit(magnitudes)[1]) <= bound if magnitudes.any() else not fit(magnitudes)[1].any()


@pytest.mark.parametrize("name", CASES)
def test_exponentials_are_exactly_the_reference_decoders(name):
    payload, _ = DoubleExponential().encode(CASES[name], codec_conformance.STREAM)
    out = np.empty_like(CASES[name])
    DoubleExponential.decode(payload, out)
    assert np.array_equal(out, np.array(fits_decoder.dexp(payload.tobytes(), out.size), np.float32))


def test_wild_parameters_stay_between_the_edges():
    rng = np.random.default_rng(0)
    for n in (1, 2, 5, 700):
        for _ in range(20):
            p = rng.choice(np.array([0, 1, -1, FLT_MAX, -FLT_MAX, 1e-45, 1e5], np.float32), 4)
            edges = np.sort(rng.choice(np.array([0, 1e-45, 1, FLT_MAX], np.float32), 2))
            out = np.full(n, np.nan, np.float32)
            evaluate_exponentials(p, *edges, False, out)
            assert (out >= edges[0]).all() and (out <= edges[1]).all()
            assert out.tolist() == reference_fits.exponentials(p, *edges, n)


def test_dexp_error():
    """The notes had .14 on such values."""
    values = heavy()
    decoded, size = round_trip(DoubleExponential(), values)
    assert error(values, decoded) < 0.14 and size == 4 + 2 * 24
    assert np.array_equal(np.signbit(decoded), np.signbit(values))


def forged_fit(count=2, numbers=(1, 1, 0, 0, 1, 0) * 2):
    return np.frombuffer(struct.pack(f"<I{len(numbers)}f", count, *numbers), np.uint8)


@pytest.mark.parametrize(
    "message, payload",
    [
        ("bytes for", np.zeros(0, np.uint8)),
        ("bytes for", np.zeros(3, np.uint8)),
        ("bytes for", forged_fit()[:-1]),
        ("52 bytes for 3 of 3", forged_fit(3)),
        ("52 bytes for 0 of 3", forged_fit(0)),
        ("bytes for 4 of 3", forged_fit(4)),
        ("bytes for 4294967295 of 3", forged_fit(2**32 - 1)),
        ("28 bytes for 2 of 3", forged_fit(numbers=(1, 1, 0, 0, 1, 0))),
        ("not finite", forged_fit(numbers=(1, 1, 0, 0, 1, 0, 1, 1, 0, 0, 1, float("nan")))),
        ("not finite and ascending", forged_fit(numbers=(1, 1, 0, 0, 1, 0, 2, 1, 0, 0, 1, 0))),
        ("not finite and ascending", forged_fit(numbers=(-1, 1, 0, 0, 1, 0, 2, 2, 0, 0, 1, 0))),
    ],
)
def test_dexp_refuses(message, payload):
    out = np.zeros(3, np.float32)
    DoubleExponential.decode(forged_fit(), out)
    assert out.tolist() == [1, 1, -1]
    with pytest.raises(ContainerError, match=message):
        DoubleExponential.decode(payload, out)


# Quantile sketch


def sketch(values, most, bins, fence=lambda array: array):
    counts, lookup = fence(np.full(2 * bins + 1, 7, np.uint32)), fence(np.full(2 * bins + 1, 7, np.uint8))
    levels, table = fence(np.full(values.size, 255, np.uint8)), fence(np.full(256, np.nan, np.float32))
    used = sketch_encode(fence(values), most, counts, lookup, levels, table)
    return levels, table[:used]


@pytest.mark.parametrize("most, bins", [(4, 16), (64, 1024), (256, 2048)])
@pytest.mark.parametrize("name", CASES)
def test_sketch(name, most, bins):
    values = CASES[name][:5000]
    levels, table = sketch(values, most, bins)
    expected, means = reference_fits.sketch(values, most, bins)
    assert levels.tolist() == expected
    # The kernel's sums are rounded at each step.
    assert table.size <= most and np.allclose(table, means, rtol=1e-6, atol=1e-9 * np.abs(values).max())


def test_buckets_hold_equal_counts():
    values = heavy()
    levels, table = sketch(values, 64, 1 << 14)
    counts = np.bincount(levels)
    assert counts.size == table.size == 64
    assert 0.9 * values.size / 64 < counts.min() and counts.max() < 1.1 * values.size / 64
    order = np.argsort(values)
    assert (np.diff(levels[order].astype(int)) >= 0).mean() == 1, "the buckets overlap"
    assert (np.diff(table) > 0).all()


@pytest.mark.parametrize("text", ["sketchml", "sketchml:4", "sketchml:7:entropy=huffman", "sketchml:256:entropy=ans"])
@pytest.mark.parametrize("name", CASES)
def test_the_sketch_keeps_signs_and_zeros(name, text):
    values = CASES[name]
    decoded, _ = round_trip(value(text), values)
    assert np.array_equal(np.sign(decoded), np.sign(values))
    assert np.abs(decoded).max() <= np.abs(values).max()


def test_few_distinct_values_are_exact():
    for values in (
        CASES["ties"],
        CASES["all equal"],
        CASES["one value in zeros"],
        np.repeat(np.array([1e-30, 1e30, -1, 0], np.float32), 100),
    ):
        assert np.array_equal(round_trip(SketchML(), values)[0], values)


def test_sketch_error():
    """The notes had .18 on such values; a code of the numbers gains where values repeat, and only there."""
    values = heavy()
    decoded, size = round_trip(SketchML(), values)
    assert error(values, decoded) < 0.18 and abs(size * 8 / values.size - 6) < 0.25
    for entropy in ("huffman", "ans"):
        same, coded = round_trip(SketchML(entropy=entropy), values)
        assert np.array_equal(same, decoded) and coded <= size
        zeros = np.where(np.arange(5000) % 20 == 0, gauss(5000), 0).astype(np.float32)
        assert round_trip(SketchML(entropy=entropy), zeros)[1] < 0.5 * round_trip(SketchML(), zeros)[1]


def forged_sketch(last=1, table=(1, 2), levels=(0, 0b101)):
    return np.frombuffer(bytes([last]) + struct.pack(f"<{len(table)}f", *table) + bytes(levels), np.uint8)


@pytest.mark.parametrize(
    "message, payload",
    [
        ("the table is missing", np.zeros(0, np.uint8)),
        ("the table is missing", forged_sketch()[:8]),
        ("the table is missing", forged_sketch(255)),
        ("levels", forged_sketch()[:-1]),
        ("levels", forged_sketch()[:-2]),
        ("a level is out of range", forged_sketch(2, (1, 2, 3), (0, 0b111111))),
        ("a mean is not finite", forged_sketch(table=(1, float("inf")))),
        ("a mean is not finite", forged_sketch(table=(float("nan"), 1))),
    ],
)
def test_sketchml_refuses(message, payload):
    out = np.zeros(3, np.float32)
    SketchML.decode(forged_sketch(), out)
    assert out.tolist() == [2, 1, 2]
    with pytest.raises(ContainerError, match=message):
        SketchML.decode(payload, out)


# Memory


def fits_in_fences(fence):
    good = True
    for k in (*range(1, 20), 255, 256, 257, 700):
        values = gauss(k, k)
        order, ordered, _ = sort(values, fence)
        good &= np.array_equal(ordered, values[order])
        magnitudes = fence(np.sort(np.abs(values)))
        ends = fence(np.zeros(5, np.int64))
        ends = fence(ends[: find_knots(magnitudes, 3, ends)])
        c = fence(np.zeros((ends.size, 6), np.float32).reshape(-1)).reshape(ends.size, 6)
        fit_segments(magnitudes, ends, c)
        edges, out = fence(np.zeros(ends.size + 1, np.float32)), fence(np.ones(k, np.float32))
        evaluate_segments(c, edges, ends, True, out)
        good &= not out.any()
        parameters = fence(np.zeros(4, np.float32))
        fit_exponentials(magnitudes, parameters)
        evaluate_exponentials(parameters, np.float32(0), np.float32(0), True, out)
        good &= not out.any()
        levels, table = sketch(values, 4, 16, fence)
        look_up(levels, fence(np.append(table, np.zeros(256 - table.size, np.float32))), out)
        good &= np.array_equal(np.sign(out), np.sign(values))
    return good


def test_kernels_stay_inside_their_arrays():
    fits_in_fences(np.copy)  # compiled here, not in the child
    assert survives(fits_in_fences)
