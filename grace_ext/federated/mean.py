"""What the server makes of a round's updates: the weighted mean; and what all means promise."""

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from ..errors import ConfigError

BLOCK = 1 << 16  # elements of the model that a mean by coordinates sorts at once


@dataclasses.dataclass(frozen=True)
class Update:
    """What counts of a client: its update, or with memory "ef21" the server's estimate of it.

    vector() -> float32[d], finite, which is not to be changed; it may be decoded anew at each call. norm: its L2 norm.
    share: of this client in a weighted mean, 0 to 1.
    """

    vector: Callable[[], np.ndarray]
    norm: float
    share: float


def check_share(kind: str, share: float) -> None:
    """Raises ConfigError unless it is a share of clients that robust means can do without."""
    if not 0 <= share < 0.5:
        raise ConfigError(f"{kind}: share={share}; allowed: from 0 to below 0.5")


def most_liars(share: float, clients: int) -> int:
    """That share of the clients, rounded up to whole ones as long as they are fewer than half."""
    return min(math.ceil(share * clients - 1e-9), (clients - 1) // 2)


def blocks(vectors: Sequence[np.ndarray]) -> Iterator[tuple[slice, np.ndarray]]:
    """float32[d] of each client -> (which elements of the model, a copy of these, float32[clients, elements])"""
    for start in range(0, vectors[0].size, BLOCK):
        part = slice(start, start + BLOCK)
        yield part, np.stack([vector[part] for vector in vectors])


class Mean:
    """mean(updates, size) -> float32[size]. updates: at least one. A mean has no state between rounds."""

    #: Whether each element is judged by itself. An element that a client did not send is not a vote for 0, so the server
    #: then refuses sparse updates; and weights, because what such means promise counts clients.
    by_coordinate = False

    def __call__(self, updates: Sequence[Update], size: int) -> np.ndarray:
        raise NotImplementedError


class WeightedMean(Mean):
    """The mean of FedAvg (McMahan et al., AISTATS 2017). One client can move it by its share of any length that the server's
    norm check lets pass. One decoded update at a time."""

    def __call__(self, updates: Sequence[Update], size: int) -> np.ndarray:
        mean = np.zeros(size, np.float32)
        for update in updates:
            mean += np.float32(update.share) * update.vector()
        return mean


class CoordinateMean(Mean):
    """Base of means that judge each element by itself. All updates of a round are decoded at once, float32[d] each, unless
    they are estimates, which the server has anyway; what is sorted is a block of the model."""

    by_coordinate = True

    def __call__(self, updates: Sequence[Update], size: int) -> np.ndarray:
        vectors, mean = [update.vector() for update in updates], np.empty(size, np.float32)
        for part, block in blocks(vectors):
            block.sort(axis=0)
            mean[part] = self.of_sorted(block)
        return mean

    def of_sorted(self, block: np.ndarray) -> np.ndarray:
        """block: float32[clients, elements], ascending at each element -> float32[elements]"""
        raise NotImplementedError
