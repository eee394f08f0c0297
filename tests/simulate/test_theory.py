"""Theorem 1 of Kimad: the condition on step sizes, and its bound in runs of Algorithm (5) to (7)."""

import numpy as np
import pytest

from grace_ext import ConfigError
from grace_ext.simulate import Quadratic, step_sizes


def condition(found, alphas, layer_smoothness, smoothness):
    """The left sides of (9), with zeta_i and delta_i as the docstring says."""
    roots = np.sqrt(1 - np.array(alphas))
    zetas = np.where(roots > 0, 1 / np.maximum(roots, 1e-300) - 1, 1.0)
    thetas, betas = 1 - roots**2 * (1 + zetas), roots**2 * (1 + 1 / zetas)
    weights = np.array(found.weights)
    common = np.max(weights * betas) * smoothness**2 / np.min(thetas)
    return found.gamma**2 * weights * common + found.gamma * np.array(layer_smoothness) * weights


@pytest.mark.parametrize("alphas", [(0.1, 0.1, 0.1), (0.01, 0.5, 1.0), (1.0, 1.0, 1.0)])
@pytest.mark.parametrize("weights", [None, (1.0, 1.0, 1.0), (0.5, 2.0, 9.0)])
def test_the_step_sizes_are_the_largest_that_the_condition_allows(alphas, weights):
    layers = (1.0, 0.3, 0.02)
    found = step_sizes(alphas, layers, 1.0, weights)
    left = condition(found, alphas, layers, 1.0)
    assert np.max(left) == pytest.approx(1.0) and (weights is not None or np.min(left) == pytest.approx(1.0))
    assert found.rates == tuple(found.gamma * weight for weight in found.weights)
    if alphas == (1.0, 1.0, 1.0) and weights is None:
        assert found.rates == pytest.approx([1 / one for one in layers]), "without compression, 1 / L_i"


def ef21(task, rates, alphas, steps):
    """Algorithm (5) to (7) with top-k in each layer; returns the weighted norms of the gradients and the first errors."""
    parts = np.split(np.arange(task.start.size), np.cumsum(task.layers)[:-1])
    model, estimate = task.start.astype(np.float64), np.zeros(task.start.size)
    norms = []
    for step in range(steps):
        gradient, _ = task.gradient(model, 0, step)
        norms.append([float(gradient[part] @ gradient[part]) for part in parts])
        for part, rate in zip(parts, rates, strict=True):
            model[part] -= rate * estimate[part]
        gradient, _ = task.gradient(model, 0, step)
        for part, alpha in zip(parts, alphas, strict=True):
            difference = gradient[part] - estimate[part]
            chosen = part[np.argsort(-np.abs(difference))[: max(1, round(alpha * part.size))]]
            estimate[chosen] = gradient[chosen]
    return np.array(norms), [float(one) for one in norms[0]]


@pytest.mark.parametrize("weights", [None, (1.0, 1.0, 1.0)])
@pytest.mark.parametrize("alphas", [(0.1, 0.1, 0.1), (0.3, 0.05, 0.02)])
def test_runs_keep_the_bound(weights, alphas):
    task = Quadratic(300, 3)
    found = step_sizes(alphas, task.layer_smoothness, task.smoothness, weights)
    for steps in (10, 300, 2000):
        norms, errors = ef21(task, found.rates, alphas, steps)
        assert np.mean(norms @ np.array(found.weights)) <= found.bound(task._loss(task.start), errors, steps)


def test_step_sizes_by_layer_beat_one_for_all():
    """The layers of the quadratic differ in smoothness by a factor of 21."""
    task, alphas = Quadratic(300, 3), (0.1, 0.1, 0.1)
    left = []
    for weights in (None, (1.0, 1.0, 1.0)):
        rates = step_sizes(alphas, task.layer_smoothness, task.smoothness, weights).rates
        left.append(ef21(task, rates, alphas, 1000)[0][-1].sum())
    assert left[0] < left[1]


@pytest.mark.parametrize(
    "arguments, message",
    [
        (((0.0, 1.0), (1.0, 1.0), 1.0), "alphas=.*; allowed: above 0 and at most 1"),
        (((1.5, 1.0), (1.0, 1.0), 1.0), "alphas=.*; allowed: above 0 and at most 1"),
        (((0.5, 1.0), (1.0, 0.0), 1.0), "layer_smoothness=.*; allowed: above 0 and finite"),
        (((0.5,), (1.0,), float("inf")), "smoothness=.*; allowed: above 0 and finite"),
        (((0.5,), (1.0,), 1.0, (-1.0,)), "weights=.*; allowed"),
        (((0.5,), (1.0, 1.0), 1.0), "1 alphas, 2 layer_smoothness, 0 weights"),
    ],
)
def test_numbers_that_make_no_sense(arguments, message):
    with pytest.raises(ConfigError, match=message):
        step_sizes(*arguments)
