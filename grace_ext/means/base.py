"""The base class of the means that are taken of the updates of a round, and the weighted mean."""

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from ..errors import ConfigError

BLOCK = 1 << 16  # elements of the model that a mean by coordinates sorts at once


@dataclasses.dataclass(frozen=True)
class Update:
    """What one worker contributes to the mean: a client's update or a rank's pseudo-gradient, or an estimate of it.

    Attributes:
        vector: Returns the update, float32[d], finite, which must not be changed; each call may decode it again.
        norm: Its L2 norm.
        share: The worker's share in a weighted mean, 0 to 1.
        dense: Returns bool[d], or one for all: of which elements the worker has sent a value even where it is 0. Of the others, those
            count as sent that are not 0.
    """

    vector: Callable[[], np.ndarray]
    norm: float
    share: float
    dense: Callable[[], np.ndarray | bool]


def l2_norm(vector: np.ndarray) -> float:
    """Compute the L2 norm of a vector.

    Args:
        vector: float32[d].

    Returns:
        The norm, computed in float64, so that it is finite for every finite vector.
    """
    return float(np.linalg.norm(vector.astype(np.float64)))


def check_share(kind: str, share: float) -> None:
    """Check the share of clients that a robust mean leaves out.

    Args:
        kind: Name of the mean, for the message.
        share: The share.

    Raises:
        ConfigError: The share is not in [0, 0.5).
    """
    if not 0 <= share < 0.5:
        raise ConfigError(f"{kind}: share={share}; allowed: from 0 to below 0.5")


def byzantine_count(share: float, clients: int) -> int:
    """Compute how many clients may be Byzantine, that is, may send anything.

    Args:
        share: Their share of all clients.
        clients: Number of clients.

    Returns:
        Their number, rounded up, but always less than half of the clients.
    """
    return min(math.ceil(share * clients - 1e-9), (clients - 1) // 2)


def blocks(vectors: Sequence[np.ndarray]) -> Iterator[tuple[slice, np.ndarray]]:
    """Split vectors into blocks of elements.

    Args:
        vectors: float32[d] for each client.

    Yields:
        Which elements of the model the block has, and a copy of those, float32[clients, elements].
    """
    for start in range(0, vectors[0].size, BLOCK):
        part = slice(start, start + BLOCK)
        yield part, np.stack([vector[part] for vector in vectors])


class Mean:
    """Base of the means: `mean(updates, size)` returns float32[size] for at least one update.

    A mean has no state between rounds. Its text names its options, so that ranks can compare theirs.
    """

    #: Whether each element is judged by itself. Such a mean requires dense updates, because an element that was not sent is
    #: not a zero, and uniform weights, because its guarantee is stated in numbers of clients.
    by_coordinate = False

    def __call__(self, updates: Sequence[Update], size: int) -> np.ndarray:
        raise NotImplementedError

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{option}={value!r}' for option, value in vars(self).items())})"


def check_mean(mean: object, uniform: bool) -> None:
    """Check a mean that a user has given.

    Args:
        mean: What the user gave.
        uniform: Whether all workers count alike.

    Raises:
        ConfigError: It is no mean, or a mean by coordinates although workers do not count alike.
    """
    if not isinstance(mean, Mean):
        raise ConfigError(
            f"mean={mean!r}; allowed: an instance of WeightedMean, SenderMean, ClippedMean, Median, TrimmedMean or "
            "NearestNeighborMixing"
        )
    if mean.by_coordinate and not uniform:
        raise ConfigError(f"mean {mean!r} takes no weights; allowed: weights='uniform'")


class WeightedMean(Mean):
    """The mean of FedAvg (McMahan et al., AISTATS 2017).

    One client can change the mean by up to its share times the largest accepted norm. One update is decoded at a time.
    """

    def __call__(self, updates: Sequence[Update], size: int) -> np.ndarray:
        mean = np.zeros(size, np.float32)
        for update in updates:
            mean += np.float32(update.share) * update.vector()
        return mean


class CoordinateMean(Mean):
    """Base of means that judge each element by itself.

    All updates of a round are decoded at once, float32[d] each, unless they are estimates, which the server has anyway.
    Elements are sorted one block of the model at a time.
    """

    by_coordinate = True

    def __call__(self, updates: Sequence[Update], size: int) -> np.ndarray:
        vectors, mean = [update.vector() for update in updates], np.empty(size, np.float32)
        for part, block in blocks(vectors):
            block.sort(axis=0)
            mean[part] = self.of_sorted(block)
        return mean

    def of_sorted(self, block: np.ndarray) -> np.ndarray:
        """Compute the mean of each element.

        Args:
            block: float32[clients, elements], the values of each element in ascending order.

        Returns:
            float32[elements].
        """
        raise NotImplementedError
