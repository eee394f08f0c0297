"""Projections: the survey's formulas and those of the system design, worked out by hand."""

import math

import numpy as np
import pytest
from support.arrays import gauss

import grace_ext
from grace_ext import ConfigError
from grace_ext.policy import projections
from grace_ext.policy.projections import contraction, efficiency, error_bound, optimal_ratio


def test_the_ratio_is_the_surveys_for_two_workers():
    """compute_time / (size / bandwidth), at most 1."""
    for gigabytes, gbps, seconds in ((4, 10, 0.1), (1, 100, 0.05), (0.04, 400, 1.0)):
        params = int(gigabytes * 1e9 / 4)
        expected = min(1.0, seconds / (gigabytes * 8 / gbps))
        assert optimal_ratio(params, seconds, gbps * 1e9, 2) == pytest.approx(expected)


def test_more_workers_and_latency_leave_less():
    ratios = [optimal_ratio(10**7, 0.1, 1e9, workers, latency=1e-3) for workers in (2, 4, 8, 64, 1024)]
    assert ratios == sorted(ratios, reverse=True) and ratios[-1] == 0.0
    assert optimal_ratio(10**7, 0.1, 1e9, 4, overlap=0.5) == pytest.approx(0.5 * optimal_ratio(10**7, 0.1, 1e9, 4))


def test_efficiency():
    assert efficiency(0.1, 8, 0.1) == 0.5 and efficiency(0.1, 8, 0.0) == 1.0
    for workers in (2, 64, 1024):  # the document's E(P) = 1 / (1 + P T_comm / T_compute)
        assert efficiency(2.0, workers, 0.01, strong=True) == pytest.approx(1 / (1 + workers * 0.01 / 2.0))
    assert projections.WORKERS == (2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)


@pytest.mark.parametrize("density", [0.001, 0.1, 0.5])
def test_top_k_contracts_by_at_most_its_share(density):
    """Remark 1 of DeepReduce's appendix and the survey's error bound: 1 - k / d, reached where all magnitudes are equal."""
    for gradient in (gauss(10_000), np.random.default_rng(0).standard_t(2, 10_000).astype(np.float32)):
        assert contraction(f"topk:{density}", gradient) <= 1 - density
    assert contraction(f"topk:{density}", np.sign(gauss(10_000))) == pytest.approx(1 - density)
    assert contraction("dense/raw", gauss(100)) == 0.0


def test_top_k_is_not_worse_than_random_k_whose_error_is_what_it_leaves_out():
    gradient = gauss(20_000)
    errors = [contraction(f"{name}:0.1", gradient) for name in ("topk", "randomk")]
    assert errors[0] < errors[1] == pytest.approx(0.9, abs=0.02)


def moments(spec, gradient, draws):
    """Means over as many draws: (‖C(g)‖² / ‖g‖², ‖g - C(g)‖² / ‖g‖²)."""
    c, g = grace_ext.compressor(spec), gradient.astype(np.float64)
    found = [grace_ext.decompress(c.compress(gradient, step=step), g.size).astype(np.float64) for step in range(draws)]
    return np.mean([(x @ x, (g - x) @ (g - x)) for x in found], axis=0) / (g @ g)


@pytest.mark.parametrize(
    "spec, contraction",  # 1 - δ, from the compressors' papers
    [
        ("randomk:0.75:unbiased=true/rice/raw", 1 / 0.75 - 1),
        ("randomk:0.6:unbiased=true/rice/raw", 1 / 0.6 - 1),
        ("dense/qsgd:levels=32:norm=l2:bucket=256", 256 / 32**2),
        ("dense/natural", 1 / 8),
    ],
)
def test_the_second_moment_of_unbiased_compressors_is_within_lemma_5(spec, contraction):
    """E ‖C(g)‖² <= (2 - δ) ‖g‖² of DeepReduce's appendix, and for random-k no less; 20 draws of 20,000 elements."""
    moment, error = moments(spec, gauss(20_000), draws=20)
    assert moment <= 2 - (1 - contraction) + 0.01 and error <= contraction + 0.01
    assert moment == pytest.approx(1 + error, abs=0.01), "of an unbiased compressor, by (7)"
    if spec.startswith("randomk"):
        assert moment == pytest.approx(1 + contraction, abs=0.01)


@pytest.mark.parametrize(
    "value", ["raw", "lloyd:0.3", "onebit", "sign", "sketchml:4", "minmax:2", "polyfit", "dexp", "threelc"]
)
@pytest.mark.parametrize("sparsifier", ["dense", "topk:0.1/rice", "threshold:1.5/rice"])
def test_the_second_moment_of_biased_compressors_is_within_lemma_5(sparsifier, value):
    """At most 2 (2 - δ) ‖g‖², where 1 - δ is what was measured of the error, and by the triangle inequality (1 + √(1 - δ))² ‖g‖²."""
    moment, error = moments(f"{sparsifier}/{value}", gauss(20_000), draws=1)
    assert error < 1, "a δ-compressor"
    assert moment <= 2 * (1 + error)
    assert (1 - math.sqrt(error)) ** 2 <= moment * (1 + 1e-6) <= (1 + math.sqrt(error)) ** 2 * (1 + 2e-6)


def test_the_bound_is_the_surveys():
    assert error_bound(100, 2.0, 0.1, 0.99) == pytest.approx(2 / math.sqrt(100) + 0.99 * 0.1 * 4)
    assert error_bound(10**12, 2.0, 0.1, 0.0) == pytest.approx(2e-6)
    by_density = [error_bound(1000, 1.0, 0.1, 1 - density) for density in (0.001, 0.01, 0.1, 1.0)]
    assert by_density == sorted(by_density, reverse=True)


def test_the_table():
    text = projections.table({"none": {2: 0.5, 1024: 0.01}, "default": {2: 1.0, 1024: 0.123}})
    assert [line.split() for line in text.splitlines()] == [
        ["E(P),", "workers:", "2", "1024"],
        ["none", "50", "%", "1", "%"],
        ["default", "100", "%", "12", "%"],
    ]


@pytest.mark.parametrize(
    "call, name",
    [
        (lambda: efficiency(0, 2, 0.1), "step_time"),
        (lambda: efficiency(1, 0, 0.1), "workers"),
        (lambda: efficiency(1, 2, -0.1), "exchange_seconds"),
        (lambda: error_bound(0, 1, 1, 0.5), "steps"),
        (lambda: error_bound(1, math.inf, 1, 0.5), "gradient_norm"),
        (lambda: error_bound(1, 1, -1, 0.5), "learning_rate"),
        (lambda: error_bound(1, 1, 1, -0.5), "contraction"),
        (lambda: contraction("powersgd:4", gauss(10)), "makes no container"),
    ],
)
def test_numbers_that_make_no_sense(call, name):
    with pytest.raises(ConfigError, match=name):
        call()
