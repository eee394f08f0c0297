"""Random positions, the same on all ranks: no index section, and allreduce can sum the values as they are.

Konečný et al., Federated learning: strategies for improving communication efficiency, 2016; Wangni et al., Gradient
sparsification for communication-efficient distributed optimization, NeurIPS 2018; Stich, Cordonnier and Jaggi,
Sparsified SGD with memory, NeurIPS 2018, for error feedback. One position is drawn in each of k equal strata, turned
by one random offset: each position is sent with probability k / d, so mean and variance are those of an independent
choice, and no part of the gradient is left out for long.
"""

import numpy as np

from .._util.scratch import scratch
from ..errors import ConfigError
from ..kernels import draw_positions
from ..kernels.topk import NON_FINITE
from ..registry import register
from .base import Sparsifier
from .threshold import above


@register
class RandomK(Sparsifier):
    """density: the share of elements to send, above 0 and at most 1; at least one element. unbiased: multiply them by
    d / k, so that the average over steps is the gradient; for memory `none` only. Ranks share the positions, so the mean of
    n ranks varies as much as what one sends, not 1/n of it."""

    name = "randomk"
    shared = True

    def __init__(self, density: float = 0.01, unbiased: bool = False):
        if not 0 < density <= 1:
            raise ConfigError(f"randomk: density={density}; allowed: above 0 and at most 1")
        self.density = density
        self.unbiased = unbiased

    def select(self, dense, scope):
        return self._pick(dense, above(dense, None, None, NON_FINITE)[0].size, scope)

    def select_compensated(self, gradient, residual, out, scope):
        return self._pick(out, above(gradient, residual, out, NON_FINITE)[0].size, scope)

    def _pick(self, dense, non_finite, scope):
        d = dense.size
        k = min(d, max(1, round(self.density * d)))
        indices, values = scratch("randomk indices", np.uint32, k), scratch("randomk values", np.float32, k)
        if k:
            draw_positions(indices, d, *scope.stream.shared().key())
            np.take(dense, indices, out=values, mode="clip")  # "raise" would copy
            if non_finite:
                values[0] = np.nan  # wherever in the gradient it is
        return indices, values
