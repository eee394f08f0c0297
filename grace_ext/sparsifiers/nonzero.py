"""Sparsifier `nonzero`."""

import numpy as np

from ..registry import register
from .base import Scope, Sparsifier
from .threshold import select_at_least


@register
class NonZero(Sparsifier):
    """Selects every element that is not zero: lossless, for gradients that are sparse already, as those of embeddings."""

    name = "nonzero"
    bound = 1  #: The bits of the smallest magnitude to select.

    def select(self, dense: np.ndarray, scope: Scope) -> tuple[np.ndarray, np.ndarray]:
        return select_at_least(dense, None, None, np.uint32(self.bound))

    def select_compensated(
        self, gradient: np.ndarray, residual: np.ndarray, out: np.ndarray, scope: Scope
    ) -> tuple[np.ndarray, np.ndarray]:
        return select_at_least(gradient, residual, out, np.uint32(self.bound))
