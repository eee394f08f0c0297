"""The mean of updates that are clipped to a norm.

Karimireddy, He and Jaggi, Learning from history for Byzantine robust optimization, ICML 2021: centered clipping, in one
iteration from the center 0. With this center it is the norm clipping of Sun, Kairouz, Suresh and McMahan, Can you really
backdoor federated learning?, 2019.
"""

import math
import statistics
from collections.abc import Sequence

import numpy as np

from ..errors import ConfigError
from .base import Mean, Update


class ClippedMean(Mean):
    """The weighted mean of updates, of which the longer ones are scaled down to the norm `radius`.

    A client thus moves the mean by no more than its share of the radius. One update is decoded at a time.

    Args:
        radius: An L2 norm, finite and above 0; None: the median of the norms of the updates.

    Raises:
        ConfigError: The radius is out of range.
    """

    def __init__(self, radius: float | None = None):
        if radius is not None and not (math.isfinite(radius) and radius > 0):
            raise ConfigError(f"ClippedMean: radius={radius}; allowed: finite and above 0, or None")
        self.radius = radius

    def __call__(self, updates: Sequence[Update], size: int) -> np.ndarray:
        radius = statistics.median(update.norm for update in updates) if self.radius is None else self.radius
        mean = np.zeros(size, np.float32)
        for update in updates:
            scale = min(1.0, radius / update.norm) if update.norm > 0 else 1.0
            mean += np.float32(update.share * scale) * update.vector()
        return mean
