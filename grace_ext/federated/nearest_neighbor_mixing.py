"""Updates are mixed with their nearest neighbors before a robust mean is taken of them.

Allouah, Farhadkhani, Guerraoui, Gupta, Pinot and Stephan, Fixing by mixing: a recipe for optimal Byzantine ML under
heterogeneity, AISTATS 2023, Algorithm 2 (NNM).
"""

from collections.abc import Sequence

import numpy as np

from ..errors import ConfigError
from .mean import CoordinateMean, Mean, Update, blocks, check_share, most_liars


class NearestNeighborMixing(Mean):
    """A mean by coordinates, of updates each of which is replaced by the mean of those that are nearest to it, itself among
    them: of as many as are left without the liars. Honest updates become alike, so that the mean loses less where clients
    have different data or small batches.

    mean: a Median or a TrimmedMean. share: of the clients, at least as many as may lie; rounded up to whole clients as long
    as they are fewer than half. Raises ConfigError for another mean, and unless the share is from 0 to below 1/2.

    All updates of a round are decoded at once, as for `mean` alone; it takes clients**2 distances of float64, and what is
    mixed is a block of the model.
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
        """Of each update in what replaces each: float32[clients, clients], the rows of which add up to 1."""
        clients = len(vectors)
        distances = np.zeros((clients, clients))  # squared
        for _, block in blocks(vectors):
            for client in range(clients - 1):
                away = block[client + 1 :] - block[client]
                distances[client, client + 1 :] += np.einsum("ij,ij->i", away, away, dtype=np.float64)
        distances += distances.T
        nearest = distances.argsort(axis=1, kind="stable")[:, : clients - most_liars(self.share, clients)]
        weights = np.zeros((clients, clients), np.float32)
        np.put_along_axis(weights, nearest, np.float32(1 / nearest.shape[1]), axis=1)
        return weights
