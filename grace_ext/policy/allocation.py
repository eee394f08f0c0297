"""A budget of bytes, or of error, spread over layers.

Kimad+: Xin et al., Kimad: adaptive gradient compression with bandwidth awareness, DistributedML 2023, section 3.2 and
Algorithm 4, which turns round Alimohammadi et al., L-GreCo: layerwise-adaptive gradient compression, MLSys 2024: the least
error for a budget of bytes instead of the least bytes for a budget of error. Both are knapsacks with one choice a layer.
"""

import math
from collections.abc import Sequence

import numpy as np

from .._util.scratch import scratch
from ..errors import ConfigError
from ..kernels.curves import BINS, LANES, SHIFT, knapsack, magnitude_histogram
from ..kernels.topk import NON_FINITE

#: Densities that a layer may get.
DENSITIES = tuple(float(f"{10 ** (exponent / 24):.3g}") for exponent in range(-96, 1))
STEPS = 1000  # that a budget is divided in; what a layer takes is rounded up to whole ones

_EDGES = np.arange(BINS, dtype=np.uint32) << SHIFT
_FINITE = int(NON_FINITE >> SHIFT)  # bins before this one
_LOW = _EDGES[:_FINITE].view(np.float32).astype(np.float64)
_HIGH = np.append(_LOW[1:], float(np.finfo(np.float32).max))
_SQUARES = (_LOW**2 + _LOW * _HIGH + _HIGH**2) / 3  # the mean of squares, of elements that are spread evenly
_SQUARES[0] = 0  # zeros


class ErrorCurve:
    """Squared error of a layer by how many of its largest magnitudes are sent, from a histogram of them: within 1 % of the
    exact one on real gradients."""

    def __init__(self, gradient: np.ndarray, residual: np.ndarray | None = None):
        """Both float32[d]; a residual is added. Raises ConfigError if an element is not finite."""
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

    def __call__(self, k) -> np.ndarray:
        """Squared error if the k largest are sent; k: a number or an array of them, from 0 to d."""
        return np.maximum(np.interp(k, self._sent, self._left), 0.0)


def least_error(curves: Sequence[ErrorCurve], sizes, budget: float, steps: int = STEPS) -> np.ndarray:
    """Which choice each layer gets, int64[layers], so that the error is the least for at most `budget` bytes.

    sizes: float[layers, choices], bytes of each layer with each of DENSITIES. Where even the smallest of all layers are
    more than the budget, those.
    """
    sizes, errors = _choices(curves, sizes)
    return _chosen(sizes, errors, budget, steps)


def least_bytes(curves: Sequence[ErrorCurve], sizes, budget: float, steps: int = STEPS) -> np.ndarray:
    """The dual: the fewest bytes for a squared error of at most `budget` in all; the smallest error where none is small
    enough."""
    sizes, errors = _choices(curves, sizes)
    return _chosen(errors, sizes, budget, steps)


def _choices(curves, sizes) -> tuple[np.ndarray, np.ndarray]:
    sizes = np.asarray(sizes, np.float64)
    if sizes.shape != (len(curves), len(DENSITIES)):
        raise ConfigError(
            f"sizes of {len(curves)} layers with each of {len(DENSITIES)} densities are needed, not an array "
            f"of shape {sizes.shape}"
        )
    errors = np.array([curve(counts_of(curve.size)) for curve in curves]).reshape(sizes.shape)
    return sizes, errors


def counts_of(d: int) -> np.ndarray:
    """Elements that a top-k of each of DENSITIES sends of d."""
    return np.clip(np.round(np.array(DENSITIES) * d), 1, d)


def _chosen(costs, values, budget, steps) -> np.ndarray:
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
