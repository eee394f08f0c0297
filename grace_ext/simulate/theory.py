"""Theorem 1 of Kimad: step sizes for each layer with which EF21 converges, and the bound that they keep."""

import dataclasses
import math
from collections.abc import Sequence

import numpy as np

from ..errors import ConfigError


@dataclasses.dataclass(frozen=True)
class StepSizes:
    """Step sizes of the layers, and what the bound takes.

    Attributes:
        rates: The step size γ_i = γ w_i of each layer.
        gamma: γ.
        weights: w_i.
        theta: θ, the least of 1 − sqrt(1 − α_i).
    """

    rates: tuple[float, ...]
    gamma: float
    weights: tuple[float, ...]
    theta: float

    def bound(self, gap: float, errors: Sequence[float], steps: int) -> float:
        """Compute the right side of the theorem: a bound of the mean over steps of sum_i w_i ‖∇_i f‖².

        Args:
            gap: f at the start minus its infimum.
            errors: For each layer, the squared distance of the first estimate from the gradient.
            steps: Number of steps, K.

        Returns:
            2 gap / (γ K) + sum_i w_i errors_i / (θ K), which is the theorem's with δ_i = w_i.
        """
        return 2 * gap / (self.gamma * steps) + float(np.dot(self.weights, errors)) / (self.theta * steps)


def step_sizes(
    alphas: Sequence[float], layer_smoothness: Sequence[float], smoothness: float, weights: Sequence[float] | None = None
) -> StepSizes:
    """Compute the largest step sizes that Theorem 1 allows.

    The constants that it leaves open are ζ_i = 1 / sqrt(1 − α_i) − 1, which makes β_i / θ_i the least, and δ_i = w_i, which makes
    max(w_i / δ_i) max(δ_i β_i) the least.

    Args:
        alphas: For each layer, α_i of its compressor, ‖C(x) − x‖² ≤ (1 − α_i) ‖x‖²: the density of top-k. Above 0, at most 1.
        layer_smoothness: L_i of each layer (Assumption 1), above 0.
        smoothness: L of all layers together (Assumption 2), above 0.
        weights: w_i, above 0; None: those with which (9) is an equality for every layer.

    Returns:
        The step sizes.

    Raises:
        ConfigError: A number is outside its range, or the layers differ in number.

    Source:
        Xin et al., Kimad: adaptive gradient compression with bandwidth awareness, DistributedML 2023, section 3.3 and
        appendices D to F.
    """
    given = {"alphas": alphas, "layer_smoothness": layer_smoothness, "weights": weights or (), "smoothness": [smoothness]}
    for name, numbers in given.items():
        if not all(0 < one < math.inf for one in numbers) or name == "alphas" and max(numbers, default=0) > 1:
            raise ConfigError(f"{name}={numbers}; allowed: above 0 and {'at most 1' if name == 'alphas' else 'finite'}")
    layers = len(alphas)
    if not layers or len(layer_smoothness) != layers or weights is not None and len(weights) != layers:
        raise ConfigError(
            f"{layers} alphas, {len(layer_smoothness)} layer_smoothness, {len(weights or ())} weights; allowed: as many of each"
        )
    roots = np.sqrt(1 - np.array(alphas, np.float64))
    theta = float(np.min(1 - roots))
    betas = np.divide(roots**2, 1 - roots)
    own, common = np.array(layer_smoothness, np.float64), smoothness**2 / theta
    if weights is None:
        rates = 1 / (_largest_product(betas, own, common) * common + own)
        gamma, shares = float(rates.max()), rates / rates.max()
    else:
        shares = np.array(weights, np.float64)
        product = np.max(shares * betas) * common
        # The root of γ² w product + γ w L_i = 1 for each layer.
        gamma = float(np.min(2 / (shares * own + np.sqrt((shares * own) ** 2 + 4 * shares * product))))
    return StepSizes(tuple((gamma * shares).tolist()), gamma, tuple(shares.tolist()), theta)


def _largest_product(betas: np.ndarray, own: np.ndarray, common: float) -> float:
    """Return the m for which max_i γ_i β_i is m, where each γ_i = 1 / (m common + L_i) makes (9) an equality."""
    low, high = 0.0, float(np.max(betas / own))
    for _ in range(200):
        middle = (low + high) / 2
        if np.max(betas / (middle * common + own)) > middle:
            low = middle
        else:
            high = middle
    return high
