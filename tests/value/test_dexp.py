"""dexp: kernels against reference implementations, errors against known ones, and sections that are refused."""

import math
import struct

import numpy as np
import pytest
from support import codec_conformance
from support.arrays import FLT_MAX
from support.fits import CASES, error, heavy, round_trip
from support.reference_decoder import fits as fits_decoder
from support.reference_kernels import fits as reference_fits

from grace_ext import ContainerError
from grace_ext.kernels.dexp import _exp, evaluate_exponentials, fit_exponentials
from grace_ext.value.dexp import DoubleExponential


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
