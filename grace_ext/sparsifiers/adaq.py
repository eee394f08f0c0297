"""Sparsifier `adaq`."""

import math

import numpy as np

from ..errors import ConfigError
from ..registry import register
from .base import NO_VALUES, Scope, Sparsifier
from .topk import select_largest


@register
class AdaQ(Sparsifier):
    """Selects the same share of the positive and of the negative values, the largest of each.

    With value codec `onebit:0`, receivers take the mean of those of each sign, which is adaptive quantization. GRACE takes the
    thresholds from a sample, so that its shares are off by up to a quarter; here they are exact.

    Args:
        density: Share of the values of each sign to select, above 0 and at most 1; rounded up, and never a zero.

    Source:
        Dryden, Jacobs, Moon and Van Essen, Communication quantization for data-parallel training of deep neural networks, MLHPC
        2016, section III.C.
    """

    name = "adaq"

    def __init__(self, density: float = 0.01):
        if not 0 < density <= 1:
            raise ConfigError(f"adaq: density={density}; allowed: above 0 and at most 1")
        self.density = density

    def select(self, dense: np.ndarray, scope: Scope) -> tuple[np.ndarray, np.ndarray]:
        if dense.size == 0:
            return np.empty(0, np.uint32), NO_VALUES
        with np.errstate(invalid="ignore"):
            halves = np.maximum(dense, np.float32(0)), np.minimum(dense, np.float32(0))
        found = []
        for half in halves:
            k = max(1, math.ceil(self.density * np.count_nonzero(half)))  # at least one: the NaN, if there is one
            found.append(select_largest(half, half, NO_VALUES, False, k)[0].copy())
        positions = np.union1d(*found)  # both have a NaN
        return positions, dense[positions]
