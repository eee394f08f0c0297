"""Every element from a fixed magnitude on: one pass, and as many elements as there are.

Strom, Scalable distributed DNN training using commodity GPU cloud computing, Interspeech 2015; Dutta et al., On the
discrepancy between the theoretical analysis and practical implementations of compressed communication for distributed
deep learning, AAAI 2020, for the threshold on the magnitude with error feedback.
"""

import numpy as np

from .._util.scratch import scratch
from ..errors import ConfigError
from ..kernels import select_above
from ..kernels.topk import SLACK
from ..registry import register
from .base import Sparsifier

_NOTHING = np.empty(0, np.float32)


def above(gradient, residual, out, bound: int):
    """(indices uint32[k], values float32[k]) of the magnitudes whose bits are at least `bound`, NaN and Inf included.

    gradient: float32[d]; selects from gradient + residual, which is written to out, unless residual is None.
    """
    positions = scratch("above positions", np.uint32, gradient.size + SLACK)  # pages that stay unused cost nothing
    found = scratch("above found", np.uint32, gradient.size + SLACK)
    if residual is None:
        n = select_above(gradient, gradient, _NOTHING, False, bound, positions, found)
    else:
        n = select_above(gradient, residual, out, True, bound, positions, found)
    return positions[:n], found[:n].view(np.float32)


@register
class Threshold(Sparsifier):
    """value: elements with a magnitude of at least this are sent; above 0 and finite as a float32."""

    name = "threshold"

    def __init__(self, value: float = 0.01):
        with np.errstate(over="ignore", under="ignore"):
            bound = np.float32(value)
        if not 0 < bound < np.inf:
            raise ConfigError(f"threshold: value={value}; allowed: above 0 and finite, as a float32")
        self.value = value
        self._bound = np.uint32(bound.view(np.uint32))

    def select(self, dense, scope):
        return above(dense, None, None, self._bound)

    def select_compensated(self, gradient, residual, out, scope):
        return above(gradient, residual, out, self._bound)
