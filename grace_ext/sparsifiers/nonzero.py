"""Every element that is not zero: for gradients that are sparse by themselves, as those of embeddings, without any loss."""

import numpy as np

from ..registry import register
from .base import Sparsifier
from .threshold import above

_SMALLEST = np.uint32(1)  # the bits of the smallest magnitude that is not zero


@register
class NonZero(Sparsifier):
    name = "nonzero"

    def select(self, dense, scope):
        return above(dense, None, None, _SMALLEST)

    def select_compensated(self, gradient, residual, out, scope):
        return above(gradient, residual, out, _SMALLEST)
