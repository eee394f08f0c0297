"""The k largest magnitudes, exactly.

Aji and Heafield, Sparse communication for distributed gradient descent, EMNLP 2017; Stich, Cordonnier and Jaggi,
Sparsified SGD with memory, NeurIPS 2018, for the error feedback that it needs.
"""

import numpy as np

from ..errors import ConfigError
from ..kernels import select_topk
from ..kernels.topk import BINS, candidate_room, sample_room
from ..registry import register
from ..scratch import scratch
from .base import Sparsifier


@register
class TopK(Sparsifier):
    """density: the share of elements to send, above 0 and at most 1; at least one element, and never an exact zero."""

    name = "topk"

    def __init__(self, density: float = 0.01):
        if not 0 < density <= 1:
            raise ConfigError(f"topk: density={density}; allowed: above 0 and at most 1")
        self.density = density

    def count(self, d: int) -> int:
        """k for a tensor of d elements."""
        return min(d, max(1, round(self.density * d)))

    def select(self, dense, scope):
        return self._run(dense, dense, np.empty(0, np.float32), False)  # dense itself may be read-only

    def select_compensated(self, gradient, residual, out, scope):
        return self._run(gradient, residual, out, True)

    def _run(self, gradient, residual, out, fused):
        d = gradient.size
        if d == 0:
            return np.empty(0, np.uint32), np.empty(0, np.float32)
        k = self.count(d)
        room = candidate_room(d, k)
        positions, found, band = (scratch(f"topk {name}", np.uint32, room) for name in ("positions", "found", "band"))
        sample = scratch("topk sample", np.uint32, sample_room(d))
        n = select_topk(gradient, residual, out, fused, k, positions, found, band, sample,
                        scratch("topk histogram", np.int64, BINS))
        return positions[:n], found[:n].view(np.float32)

