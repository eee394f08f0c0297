"""A budget of bytes, or of error, spread over layers.

Kimad+ (Xin et al., Kimad: adaptive gradient compression with bandwidth awareness, DistributedML 2023, section 3.2 and
Algorithm 4) inverts Alimohammadi et al., L-GreCo: layerwise-adaptive gradient compression, MLSys 2024: the least
error for a budget of bytes instead of the least bytes for a budget of error. Both are knapsacks with one choice a layer.
"""

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from .._util.scratch import scratch
from ..errors import ConfigError
from ..kernels import NON_FINITE
from ..kernels.curves import BINS, LANES, SHIFT, knapsack, magnitude_histogram

#: Densities that a layer may get.
DENSITIES = tuple(float(f"{10 ** (exponent / 24):.3g}") for exponent in range(-96, 1))
STEPS = 1000  # equal parts that a budget is divided into

_EDGES = np.arange(BINS, dtype=np.uint32) << SHIFT
_FINITE = int(NON_FINITE >> SHIFT)  # the bins below this one hold finite magnitudes
_LOW = _EDGES[:_FINITE].view(np.float32).astype(np.float64)
_HIGH = np.append(_LOW[1:], float(np.finfo(np.float32).max))
_SQUARES = (_LOW**2 + _LOW * _HIGH + _HIGH**2) / 3  # mean square of elements spread evenly over the bin
_SQUARES[0] = 0  # the bin of the zeros


class ErrorCurve:
    """Squared error of a layer by how many of its largest magnitudes are sent.

    It is computed from a histogram of the magnitudes: within 1 % of the exact one on real gradients.

    Args:
        gradient: float32[d].
        residual: float32[d], which is added to the gradient; or None.

    Raises:
        ConfigError: An element is not finite.
    """

    def __init__(self, gradient: np.ndarray, residual: np.ndarray | None = None):
        counts = scratch("curve", np.int64, LANES * BINS).reshape(LANES, BINS)
        counts[:] = 0
        magnitude_histogram(gradient, gradient if residual is None else residual, residual is not None, counts)
        counts = counts.sum(axis=0)
        if counts[_FINITE:].any():
            raise ConfigError("an error curve needs a finite gradient")
        self.size = gradient.size
        occupied = np.flatnonzero(counts[:_FINITE])[::-1]  # the largest first
        self._sent = np.concatenate([[0.0], np.cumsum(counts[occupied])])
        squares = np.concatenate([[0.0], np.cumsum(counts[occupied] * _SQUARES[occupied])])
        self._left = squares[-1] - squares

    def __call__(self, k: float | np.ndarray) -> np.ndarray:
        """Squared error if the k largest elements are sent; k: a number or an array of them, from 0 to d."""
        return np.maximum(np.interp(k, self._sent, self._left), 0.0)


def least_error(curves: Sequence[ErrorCurve], sizes: npt.ArrayLike, budget: float, steps: int = STEPS) -> np.ndarray:
    """Choose a density for each layer so that the total squared error is the least for a budget of bytes.

    Args:
        curves: The error curve of each layer.
        sizes: float[layers, choices], bytes of each layer with each of DENSITIES.
        budget: Bytes of all layers at most. If even the smallest sizes of all layers are more, those are chosen.
        steps: Number of equal parts that the budget is divided into; what a layer takes is rounded up to whole parts.

    Returns:
        int64[layers], an index into DENSITIES for each layer.

    Raises:
        ConfigError: The sizes have another shape, or the budget is negative or not finite.
    """
    sizes, errors = _choices(curves, sizes)
    return _chosen(sizes, errors, budget, steps)


def least_bytes(curves: Sequence[ErrorCurve], sizes: npt.ArrayLike, budget: float, steps: int = STEPS) -> np.ndarray:
    """Choose a density for each layer so that the bytes are the fewest for a budget of error: the dual of `least_error`.

    Args:
        curves: The error curve of each layer.
        sizes: float[layers, choices], bytes of each layer with each of DENSITIES.
        budget: Squared error of all layers at most. If even the smallest errors are more, those are chosen.
        steps: Number of equal parts that the budget is divided into; what a layer takes is rounded up to whole parts.

    Returns:
        int64[layers], an index into DENSITIES for each layer.

    Raises:
        ConfigError: The sizes have another shape, or the budget is negative or not finite.
    """
    sizes, errors = _choices(curves, sizes)
    return _chosen(errors, sizes, budget, steps)


def _choices(curves: Sequence[ErrorCurve], sizes: npt.ArrayLike) -> tuple[np.ndarray, np.ndarray]:
    sizes = np.asarray(sizes, np.float64)
    if sizes.shape != (len(curves), len(DENSITIES)):
        raise ConfigError(
            f"sizes of {len(curves)} layers with each of {len(DENSITIES)} densities are needed, not an array "
            f"of shape {sizes.shape}"
        )
    errors = np.array([curve(counts_of(curve.size)) for curve in curves]).reshape(sizes.shape)
    return sizes, errors


def counts_of(d: int) -> np.ndarray:
    """Compute how many elements a top-k with each of DENSITIES sends.

    Args:
        d: Number of elements of the layer.

    Returns:
        float64[choices], whole numbers from 1 to d.
    """
    return np.clip(np.round(np.array(DENSITIES) * d), 1, d)


def _chosen(costs: np.ndarray, values: np.ndarray, budget: float, steps: int) -> np.ndarray:
    if not (math.isfinite(budget) and budget >= 0):
        raise ConfigError(f"budget={budget}; allowed: finite, from 0 on")
    rows = len(costs)
    chosen = costs.argmin(axis=1)
    if not rows or not budget:
        return chosen
    unit = budget / steps
    weights = np.minimum(np.ceil(costs / unit * (1 - 1e-12)), steps + 1).astype(np.int64)
    room = np.empty((2, steps + 1)), np.empty((rows, steps + 1), np.uint8)
    best = np.empty(rows, np.int64)
    return best if knapsack(weights, values, *room, best) else chosen
