"""The largest magnitudes, about k: from a threshold that a sample gives.

Lin et al., Deep gradient compression, ICLR 2018: the threshold is a quantile of a small random sample, and where it lets
too many pass, the k largest of those are taken. (The momentum correction of that paper is a memory, not a sparsifier.)
"""

import math

import numpy as np

from .._util.scratch import scratch
from ..errors import ConfigError
from ..kernels import draw_positions
from ..kernels.topk import MAGNITUDE
from ..registry import register
from .base import Sparsifier
from .threshold import above
from .topk import select_largest

_NOTHING = np.empty(0, np.float32)
_RANK = 400  # the threshold is at least the so-many-th largest of the sample: 5 % of standard deviation
_TOO_MANY = 1.2  # times k; then the k largest of them are taken


@register
class DGC(Sparsifier):
    """density: the share of elements to send, above 0 and at most 1, give or take a fifth. sample: the share of elements
    that are looked at first, above 0 and at most 1; more of them where fewer would not tell the threshold."""

    name = "dgc"

    def __init__(self, density: float = 0.01, sample: float = 0.01):
        for key, share in (("density", density), ("sample", sample)):
            if not 0 < share <= 1:
                raise ConfigError(f"dgc: {key}={share}; allowed: above 0 and at most 1")
        self.density = density
        self.sample = sample

    def select(self, dense, scope):
        return self._run(dense, None, None, scope)

    def select_compensated(self, gradient, residual, out, scope):
        return self._run(gradient, residual, out, scope)

    def _run(self, gradient, residual, out, scope):
        d = gradient.size
        if d == 0:
            return np.empty(0, np.uint32), _NOTHING
        bound = self._bound(gradient, residual, scope.stream)
        indices, values = above(gradient, residual, out, bound)
        k = min(d, max(1, round(self.density * d)))
        if indices.size > _TOO_MANY * k:
            chosen, values = select_largest(values, values, _NOTHING, False, k)
            indices = indices[chosen]
        return indices, values

    def _bound(self, gradient, residual, stream) -> np.uint32:
        """The bits of the magnitude that about density * d elements reach; at least those of the smallest above zero."""
        d = gradient.size
        n = min(d, math.ceil(max(self.sample * d, _RANK / self.density)))
        positions = scratch("dgc positions", np.uint32, n)
        draw_positions(positions, d, *stream.key())
        sample = gradient[positions]
        if residual is not None:
            with np.errstate(over="ignore", invalid="ignore"):
                sample += residual[positions]
        magnitudes = sample.view(np.uint32) & MAGNITUDE
        rank = min(n, max(1, round(self.density * n)))
        return np.uint32(max(1, np.partition(magnitudes, n - rank)[n - rank]))
