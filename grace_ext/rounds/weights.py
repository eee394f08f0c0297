"""How much each worker counts in the mean of a round."""

from collections.abc import Mapping
from typing import TypeVar

UNIFORM, SAMPLES = "uniform", "samples"  # all count alike, or by their numbers of samples

Worker = TypeVar("Worker")


def shares_of(weights: Mapping[Worker, float]) -> dict[Worker, float]:
    """Compute the share of each worker in the mean.

    Weights are scaled by the largest one first, so that their sum does not overflow however large they are.

    Args:
        weights: The weight of each worker, finite and not negative.

    Returns:
        The share of each worker, 0 to 1. The shares add up to 1, or are all 0 if no weight is above 0.
    """
    largest = max(weights.values(), default=0.0)
    if not largest:
        return dict.fromkeys(weights, 0.0)
    scaled = {worker: weight / largest for worker, weight in weights.items()}
    total = sum(scaled.values())
    return {worker: weight / total for worker, weight in scaled.items()}
