"""Sparsifier `randomk`."""

import numpy as np

from .._util.scratch import scratch
from ..errors import ConfigError
from ..kernels import NON_FINITE, draw_positions
from ..registry import register
from .base import Scope, Sparsifier
from .threshold import select_at_least


@register
class RandomK(Sparsifier):
    """Selects random positions, the same on all ranks: no index section is needed, and an allreduce can sum the values.

    One position is drawn in each of k equal strata, and all are shifted by one random offset. Each position is selected with
    probability k / d, so mean and variance are those of independent choices, and no part of the gradient is left out for
    long.

    Args:
        density: Share of the elements to select, above 0 and at most 1; at least one element is selected.
        unbiased: Whether the values are multiplied by d / k, so that their average over steps is the gradient; only for
            memory `none`. Since ranks share the positions, averaging over n ranks does not reduce the variance.

    Source:
        Konečný et al., Federated learning: strategies for improving communication efficiency, 2016; Wangni et al., Gradient
        sparsification for communication-efficient distributed optimization, NeurIPS 2018; with error feedback: Stich,
        Cordonnier and Jaggi, Sparsified SGD with memory, NeurIPS 2018.
    """

    name = "randomk"
    shared = True

    def __init__(self, density: float = 0.01, unbiased: bool = False):
        if not 0 < density <= 1:
            raise ConfigError(f"randomk: density={density}; allowed: above 0 and at most 1")
        self.density = density
        self.unbiased = unbiased

    def select(self, dense: np.ndarray, scope: Scope) -> tuple[np.ndarray, np.ndarray]:
        return self._pick(dense, select_at_least(dense, None, None, NON_FINITE)[0].size, scope)

    def select_compensated(
        self, gradient: np.ndarray, residual: np.ndarray, out: np.ndarray, scope: Scope
    ) -> tuple[np.ndarray, np.ndarray]:
        return self._pick(out, select_at_least(gradient, residual, out, NON_FINITE)[0].size, scope)

    def _pick(self, dense: np.ndarray, non_finite: int, scope: Scope) -> tuple[np.ndarray, np.ndarray]:
        d = dense.size
        k = min(d, max(1, round(self.density * d)))
        indices, values = scratch("randomk indices", np.uint32, k), scratch("randomk values", np.float32, k)
        if k:
            draw_positions(indices, d, *scope.stream.shared().key())
            np.take(dense, indices, out=values, mode="clip")  # "raise" would copy
            if non_finite:
                values[0] = np.nan  # wherever the gradient is not finite
        return indices, values


def scaled(values: np.ndarray, d: int) -> np.ndarray:
    """Multiply values by d / k: unbiased if each of the d elements is selected with probability k / d.

    Args:
        values: float32[k].
        d: Number of elements that the values were selected from.

    Returns:
        float32[k]; finite values stay finite, cut to the largest float32.
    """
    limit = np.finfo(np.float32).max
    with np.errstate(over="ignore"):
        return np.clip(values * np.float32(d / max(1, values.size)), -limit, limit)
