"""Sparsifier `threshold`."""

import numpy as np

from .._util.scratch import scratch
from ..errors import ConfigError
from ..kernels import select_above
from ..kernels.topk import SLACK
from ..registry import register
from .base import NO_VALUES, Scope, Sparsifier


def select_at_least(
    gradient: np.ndarray, residual: np.ndarray | None, out: np.ndarray | None, bound: np.uint32
) -> tuple[np.ndarray, np.ndarray]:
    """Select the magnitudes whose bits are at least `bound`, NaN and Inf included.

    Args:
        gradient: float32[d].
        residual: float32[d], which is added to the gradient first; None to select from the gradient alone.
        out: Output, float32[d]: gradient + residual; unused without a residual.
        bound: The bits of the smallest magnitude to select.

    Returns:
        The positions, uint32[k], strictly ascending, and the values, float32[k]; both in scratch arrays.
    """
    positions = scratch("above positions", np.uint32, gradient.size + SLACK)  # unused pages cost nothing
    found = scratch("above found", np.uint32, gradient.size + SLACK)
    if residual is None:
        n = select_above(gradient, gradient, NO_VALUES, False, bound, positions, found)
    else:
        n = select_above(gradient, residual, out, True, bound, positions, found)
    return positions[:n], found[:n].view(np.float32)


@register
class Threshold(Sparsifier):
    """Selects every element from a fixed magnitude on, in one pass; the number of selected elements varies.

    Args:
        value: The smallest magnitude to select, above 0 and finite as a float32.

    Source:
        Strom, Scalable distributed DNN training using commodity GPU cloud computing, Interspeech 2015; Dutta et al., On the
        discrepancy between the theoretical analysis and practical implementations of compressed communication for
        distributed deep learning, AAAI 2020, for the threshold on the magnitude with error feedback.
    """

    name = "threshold"

    def __init__(self, value: float = 0.01):
        with np.errstate(over="ignore", under="ignore"):
            bound = np.float32(value)
        if not 0 < bound < np.inf:
            raise ConfigError(f"threshold: value={value}; allowed: above 0 and finite, as a float32")
        self.value = value
        #: The bits of the smallest magnitude to select.
        self.bound = int(bound.view(np.uint32))

    def select(self, dense: np.ndarray, scope: Scope) -> tuple[np.ndarray, np.ndarray]:
        return select_at_least(dense, None, None, np.uint32(self.bound))

    def select_compensated(
        self, gradient: np.ndarray, residual: np.ndarray, out: np.ndarray, scope: Scope
    ) -> tuple[np.ndarray, np.ndarray]:
        return select_at_least(gradient, residual, out, np.uint32(self.bound))
