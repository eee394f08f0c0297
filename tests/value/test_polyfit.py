"""polyfit: kernels against reference implementations, errors against known ones, and sections that are refused."""

import struct
import sys

import numpy as np
import pytest
from support import codec_conformance
from support.arrays import FLT_MAX, gauss, same_bits
from support.fits import CASES, error, heavy, round_trip, value
from support.reference_decoder import fits as fits_decoder
from support.reference_kernels import fits as reference_fits

import grace_ext
from grace_ext import ContainerError
from grace_ext._util.rng import Stream
from grace_ext.kernels.polyfit import _fit, evaluate_segments, find_knots, fit_segments
from grace_ext.pipeline.container import parse
from grace_ext.value._sorting import sort_by_sign
from grace_ext.value.polyfit import PolyFit


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


_X = np.linspace(0, 1, 5001)
CURVES = {
    "square": _X**2,
    "steep": _X**16,
    "exponential": np.exp(8 * _X),
    "hyperbola": 1 / (1.1 - _X),
    "circle": 1 - np.sqrt(1 - (0.999 * _X) ** 2),
    "concave": np.sqrt(_X + 1e-3),
    "both": (_X - 0.5) ** 3,
    "kinks": np.interp(_X, [0, 0.1, 0.3, 0.35, 0.8, 1], [0, 0.01, 0.1, 0.3, 3, 20]),
    "sorted values": np.sort(np.abs(heavy()).astype(np.float64)),
}


@pytest.mark.parametrize("name", CURVES)
def test_the_knots_meet_lemma_12_and_remark_5(name):
    """Lines between p knots: at most 2 M / p**2 off, where M is the variation of the derivative on an interval of length 1 (on
    [1, d], as the lemma has it, lengths come in, which its proof leaves out), and sqrt(d) times as much in the 2-norm."""
    curve, d = CURVES[name].astype(np.float32), CURVES[name].size
    variation = np.abs(np.diff(CURVES[name], 2)).sum() * (d - 1)
    for p in (1, 2, 3, 5, 8, 13, 21, 34, 64):
        ends = np.empty(p + 1, np.int64)
        ends = ends[: find_knots(curve, 2, ends)].tolist()
        lines = [
            np.interp(np.arange(start, end), [start, end - 1], curve[[start, end - 1]])
            for start, end in zip([0, *ends], ends, strict=False)
        ]
        off = np.abs(np.concatenate(lines) - curve)
        assert off.max() <= 2 * variation / p**2
        assert np.linalg.norm(off) <= 2 * np.sqrt(d) * variation / p**2


@pytest.mark.parametrize("name", ["circle", "concave", "kinks", "steep"])
def test_constants_between_these_knots_miss_lemma_11(name):
    """The best p + 1 constants are at most M / (2 p + 2) off, where M is the variation. Those of degree 0 are means between
    knots that are chosen for lines: up to 16 times as far off."""
    curve = CURVES[name].astype(np.float32)
    for p in (1, 3, 8, 21, 64):
        bound = np.abs(np.diff(CURVES[name])).sum() / (2 * p + 2)
        count, low = 1, curve[0]  # the longest segments whose middle is near enough to all of their values
        for y in curve:
            if y - low > 2 * bound * (1 + 1e-6):
                count, low = count + 1, y
        assert count <= p + 1, "the lemma"
        ((c, low, high, magnitudes), *more) = pieces(PolyFit(0, p + 1), curve)
        assert len(more) == p
        decoded, _ = round_trip(PolyFit(0, p + 1), curve)
        assert bound < np.abs(decoded - curve).max() < 16 * bound


def test_sorting_moves_a_vector_as_lemma_4_says():
    """‖x - x_S‖² = 2 (1 - cos θ) ‖x‖², as for every permutation; x_S is made of what the codecs fit."""
    for values in (gauss(5000), heavy(), np.sort(np.abs(gauss(100)))):
        order, (plus, minus) = sort_by_sign(values)
        x, ordered = values.astype(np.float64), np.concatenate([plus, -minus]).astype(np.float64)
        assert np.array_equal(ordered, x[order])
        cosine = x @ ordered / (x @ x)
        assert np.sum((x - ordered) ** 2) == pytest.approx(2 * (1 - cosine) * (x @ x), abs=1e-9 * (x @ x))


LINES = 12  # segments for each sign


def fitted(spec, gradient, seed=0):
    """What the lemmas compare, all float64[d]: C(g) as decoded, C_δ(g), C_S(g), s; then p and M.

    C_S holds the values of C_δ as the codec sorts them, and s what it fits to them, both with zeros in front. M is the
    paper's: the variation of the derivative on [1, d].
    """
    c = grace_ext.compressor(spec, seed=seed)
    encoded = c.encode(gradient, Stream(seed))
    parsed = parse(encoded.blob)
    k, support = parsed.k, slice(None) if encoded.support is None else encoded.support
    sent = encoded.values * np.float32(gradient.size / k) if c.unbiased else encoded.values
    found = [np.zeros(gradient.size) for _ in range(4)]
    decoded, sparse, ordered, fit = found
    decoded[:] = grace_ext.decompress(encoded.blob, gradient.size)
    sparse[support] = sent
    ordered[-k:] = sent[sort_by_sign(sent)[0]]
    out = np.empty(k, np.float32)
    PolyFit.decode(parsed.value_section, out)
    fit[-k:] = out
    segments = int(parsed.value_section[1]) + int(parsed.value_section[2])
    return *found, segments - 1, np.abs(np.diff(ordered[-k:], 2)).sum()


def squared(vector):
    return float(np.sum(vector.astype(np.float64) ** 2))


def cosine(a, b):
    return a @ b / np.linalg.norm(a) / np.linalg.norm(b)


SORTED = np.sort(np.abs(gauss(5000)))  # both angles are 0, and the bounds at their tightest
HEAVY = np.random.default_rng(0).standard_t(3, 20_000).astype(np.float32)
CHOSEN = {"dense": 1.0, "topk:0.5": 0.5, "topk:0.1": 0.1, "randomk:0.75:unbiased=true": 0.75}  # r / d
MOMENTS = [
    ("topk:0.5", SORTED),
    ("topk:0.1", gauss(20_000)),
    ("topk:0.1", HEAVY),
    ("randomk:0.75:unbiased=true", SORTED),
    ("randomk:0.75:unbiased=true", gauss(20_000)),
]
P1 = "/bloom:p1:fpr=0.05:seed={seed}"


@pytest.mark.parametrize(
    "sparsifier, index, gradient",
    [("dense", "", SORTED), *((name, index, gradient) for index in ("/raw", P1) for name, gradient in MOMENTS)],
)
def test_the_second_moment_is_within_lemmas_13_and_14(sparsifier, index, gradient):
    """Of gradients whose values are fitted, and of those whose positions are in a filter with policy P1 before. (12) and (19)
    are the bounds where C_δ is unbiased, (13) and (20) where it is not; (14), (15), (21) and (22) are steps of their proofs.
    Moments and bounds are means of 8 draws and filters."""
    d, g, share, unbiased = gradient.size, squared(gradient), CHOSEN[sparsifier], "unbiased" in sparsifier
    delta = 2 - 1 / share if unbiased else share  # 1 - δ is d / r - 1 for random-r that is scaled, else 1 - r / d
    moments, bounds = [], []
    for seed in range(8):
        text = f"{sparsifier}{index.format(seed=seed)}/polyfit:1:segments={LINES}"
        result, sparse, ordered, s, p, m = fitted(text, gradient, seed)
        turned, back, fit = 1 - cosine(sparse, ordered), 1 - cosine(s, result), d * m**2 / p**4
        assert squared(sparse - ordered) == pytest.approx(2 * turned * squared(sparse), abs=1e-9 * g)
        assert squared(ordered - s) <= 4 * fit, "Remark 5"
        assert squared(ordered - result) <= 8 * fit + 2 * squared(s - result)
        if index != P1 and unbiased:
            bounds.append(2 * (2 - delta) * (1 + 4 * turned + 16 * back) * g + (1 + 4 * back) * 32 * fit)
        elif index != P1:
            bounds.append((2 * (3 - 2 * delta) + 16 * (2 - delta) * (turned + 4 * back)) * g + (1 + 4 * back) * 32 * fit)
        else:
            first = 2 * (2 - delta) + 4 * (2 - share - delta) if unbiased else 2 * (3 - delta) + 16 * (2 - share - delta)
            angles = 32 * turned * (2 - share) + (64 if unbiased else 128) * back * (2 - delta)
            bounds.append((first + angles) * g + (1 + 4 * back) * 64 * fit)
        moments.append(squared(result))
    assert np.mean(moments) <= np.mean(bounds) < 600 * g
    if sparsifier == "dense":
        assert np.mean(bounds) < 2.1 * g, "a fit that is 1.5 times too long would not pass"


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


def test_fitting_takes_a_time_for_each_value_and_coefficient():
    """O(d n), where the appendix has O(d n²) for a least-squares solution: executed lines of the kernel, as Python, are counted."""

    def lines(d, terms):
        counted = 0

        def trace(frame, event, argument):
            nonlocal counted
            counted += event == "line"
            return trace if frame.f_code is _fit.py_func.__code__ else None

        before = sys.gettrace()
        sys.settrace(trace)
        try:
            _fit.py_func(np.arange(d, dtype=np.float32) ** 2, np.empty(terms, np.float32))
        finally:
            sys.settrace(before)
        return counted

    one, two, four, eight = (lines(1024, terms) for terms in (1, 2, 4, 8))
    assert 2 * (two - one) == four - two == (eight - four) / 2, "the same for each coefficient"
    assert lines(2048, 8) == pytest.approx(2 * eight, rel=0.02) and eight > 1024 * 8


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
