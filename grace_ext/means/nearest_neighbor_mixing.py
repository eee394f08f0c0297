"""Mixing each update with its nearest neighbors before a robust mean is taken.

Allouah, Farhadkhani, Guerraoui, Gupta, Pinot and Stephan, Fixing by mixing: a recipe for optimal Byzantine ML under
heterogeneity, AISTATS 2023, Algorithm 2 (NNM).
"""

from collections.abc import Sequence

import numpy as np

from ..errors import ConfigError
from .base import CoordinateMean, Mean, Update, blocks, byzantine_count, check_share


class NearestNeighborMixing(Mean):
    """A coordinate-wise mean of updates, each first replaced by the mean of those nearest to it, itself included.

    The number of nearest updates is the number of clients minus the number assumed Byzantine. Honest updates become similar, so that
    the mean loses less where clients have different data or small batches.

    All updates of a round are decoded at once, as for `mean` alone; in addition there are clients**2 distances of float64,
    and one block of the model is mixed at a time.

    Args:
        mean: A Median or a TrimmedMean.
        share: The share of clients that may be Byzantine, from 0 to below 1/2; rounded up to whole clients as long as they
            are fewer than half.

    Raises:
        ConfigError: The mean is another one, or the share is out of range.
    """

    by_coordinate = True

    def __init__(self, mean: CoordinateMean, share: float):
        if not isinstance(mean, CoordinateMean):
            raise ConfigError(f"NearestNeighborMixing: mean={mean!r}; allowed: a Median or a TrimmedMean")
        check_share("NearestNeighborMixing", share)
        self.mean, self.share = mean, share

    def __call__(self, updates: Sequence[Update], size: int) -> np.ndarray:
        vectors, mean = [update.vector() for update in updates], np.empty(size, np.float32)
        weights = self._weights(vectors)
        for part, block in blocks(vectors):
            mixed = weights @ block
            mixed.sort(axis=0)
            mean[part] = self.mean.of_sorted(mixed)
        return mean

    def _weights(self, vectors: Sequence[np.ndarray]) -> np.ndarray:
        """Compute the weights with which updates are mixed: float32[clients, clients], whose rows add up to 1."""
        clients = len(vectors)
        distances = np.zeros((clients, clients))  # squared
        for _, block in blocks(vectors):
            for client in range(clients - 1):
                away = block[client + 1 :] - block[client]
                distances[client, client + 1 :] += np.einsum("ij,ij->i", away, away, dtype=np.float64)
        distances += distances.T
        nearest = distances.argsort(axis=1, kind="stable")[:, : clients - byzantine_count(self.share, clients)]
        weights = np.zeros((clients, clients), np.float32)
        np.put_along_axis(weights, nearest, np.float32(1 / nearest.shape[1]), axis=1)
        return weights
