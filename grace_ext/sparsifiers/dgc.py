"""Sparsifier `dgc`."""

import math

import numpy as np

from .._util.rng import Stream
from .._util.scratch import scratch
from ..errors import ConfigError
from ..kernels import draw_positions
from ..kernels._ranks import BINS
from ..kernels.topk import sampled_bound
from ..registry import register
from .base import NO_VALUES, Scope, Sparsifier
from .threshold import select_at_least
from .topk import select_largest

_RANK = 256  # the threshold is at least the 256th largest of the sample, for a standard deviation of 6 %
_TOO_MANY = 1.2  # if more than 1.2 k elements pass the threshold, the k largest of them are selected
_WORTH_SAMPLING = 64  # with less than so many elements for each in the sample, exact selection takes less time


@register
class DGC(Sparsifier):
    """Selects about the k largest magnitudes, by a threshold that a random sample gives.

    The threshold is a quantile of the sample, which consists of random lines of 16 elements. Where it lets too many elements
    pass, the k largest of those are selected. Where the sample would be more than a 64th of the elements, for which exact
    selection takes less time, the k largest of all are selected.
    (The momentum correction of the same paper is a memory, not a sparsifier.)

    Args:
        density: Share of the elements to select, above 0 and at most 1. At most a fifth more are selected, and fewer where
            fewer elements differ from 0.
        sample: Share of the elements in the sample, above 0 and at most 1. The sample is larger where so few would not
            suffice to tell the threshold.

    Source:
        Lin et al., Deep gradient compression, ICLR 2018.
    """

    name = "dgc"
    LINE = 16  #: Elements that are sampled together, which are read as fast as one.

    def __init__(self, density: float = 0.01, sample: float = 0.01):
        for key, share in (("density", density), ("sample", sample)):
            if not 0 < share <= 1:
                raise ConfigError(f"dgc: {key}={share}; allowed: above 0 and at most 1")
        self.density = density
        self.sample = sample

    def select(self, dense: np.ndarray, scope: Scope) -> tuple[np.ndarray, np.ndarray]:
        return self._run(dense, None, None, scope)

    def select_compensated(
        self, gradient: np.ndarray, residual: np.ndarray, out: np.ndarray, scope: Scope
    ) -> tuple[np.ndarray, np.ndarray]:
        return self._run(gradient, residual, out, scope)

    def count(self, d: int) -> int:
        """Return how many elements are to be selected.

        Args:
            d: Number of elements, at least 1.

        Returns:
            Their number, about.
        """
        return min(d, max(1, round(self.density * d)))

    def most(self, k: int) -> float:
        """Return how many elements may pass the threshold.

        Args:
            k: How many are to be selected.

        Returns:
            Their number. If more pass, the k largest are selected.
        """
        return _TOO_MANY * k

    def lines(self, d: int) -> int:
        """Return how many lines are sampled.

        Args:
            d: Number of elements.

        Returns:
            The number; 0 where exact selection takes less time.
        """
        n = math.ceil(max(self.sample * d, _RANK / self.density) / self.LINE)
        return n if n * self.LINE * _WORTH_SAMPLING <= d else 0

    def rank(self, size: int) -> int:
        """Return which magnitude of the sample is the threshold.

        Args:
            size: Number of elements in the sample.

        Returns:
            Its rank, from 1 on, the largest first.
        """
        return min(size, max(1, round(self.density * size)))

    def _run(
        self, gradient: np.ndarray, residual: np.ndarray | None, out: np.ndarray | None, scope: Scope
    ) -> tuple[np.ndarray, np.ndarray]:
        d = gradient.size
        if d == 0:
            return np.empty(0, np.uint32), NO_VALUES
        k, n = self.count(d), self.lines(d)
        if not n:
            if residual is None or out is None:
                return select_largest(gradient, NO_VALUES, NO_VALUES, False, k)
            return select_largest(gradient, residual, out, True, k)
        bound = self._bound(gradient, residual, n, scope.stream)
        indices, values = select_at_least(gradient, residual, out, bound)
        if indices.size > self.most(k):
            chosen, values = select_largest(values, values, NO_VALUES, False, k)
            indices = indices[chosen]
        return indices, values

    def _bound(self, gradient: np.ndarray, residual: np.ndarray | None, n: int, stream: Stream) -> np.uint32:
        """Return the bits of the magnitude that about density * d elements reach, by n lines; at least the smallest above 0."""
        lines, sample = scratch("dgc lines", np.uint32, n), scratch("dgc sample", np.uint32, 2 * self.LINE * n)
        draw_positions(lines, gradient.size // self.LINE, *stream.key())
        rank = self.rank(self.LINE * n)
        fused = residual is not None
        histogram = scratch("topk histogram", np.int64, BINS)
        return np.uint32(sampled_bound(gradient, residual if fused else NO_VALUES, fused, lines, rank, sample, histogram))
