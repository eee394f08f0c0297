"""How much each client's update counts in the mean.

McMahan et al., Communication-efficient learning of deep networks from decentralized data, AISTATS 2017, weight clients by
their numbers of samples. The server cannot check such a number, so here a client's claim counts only where the server asks
for it, and only up to a cap.
"""

import math
from collections.abc import Mapping

from ..errors import ConfigError
from ..rounds.weights import SAMPLES, UNIFORM, shares_of


class Weights:
    """The weights of clients, which are numbered from 0.

    Args:
        weights: "uniform": all clients count alike; "samples": each counts by the number of samples that it claims, up to
            most_samples; or a mapping from each client's number to its weight.
        most_samples: The cap, finite and above 0, with "samples" only.
        clients: Number of clients.

    Raises:
        ConfigError: The weights are something else, not finite, not above 0 or missing for a client, or most_samples is
            missing with "samples", present without it or out of range.
    """

    def __init__(self, weights: str | Mapping[int, float], most_samples: float | None, clients: int):
        self._weights, self._cap = weights, most_samples
        if (weights == SAMPLES) != (most_samples is not None):
            raise ConfigError(
                f"weights={weights!r} with most_samples={most_samples}; allowed: most_samples with "
                "weights='samples', which needs it, since clients may claim any number, and only with it"
            )
        if most_samples is not None and not (math.isfinite(most_samples) and most_samples > 0):
            raise ConfigError(f"most_samples={most_samples}; allowed: finite and above 0")
        if isinstance(weights, Mapping):
            if set(weights) != set(range(clients)):
                raise ConfigError(
                    f"weights are given for the clients {sorted(weights)}; needed: one for each of 0 to {clients - 1}"
                )
            if wrong := {client: one for client, one in weights.items() if not (math.isfinite(one) and one > 0)}:
                raise ConfigError(f"weights={wrong}; allowed: finite and above 0")
        elif weights not in (UNIFORM, SAMPLES):
            raise ConfigError(
                f"weights={weights!r}; allowed: 'uniform', 'samples', or a mapping from each client to its weight"
            )

    @property
    def uniform(self) -> bool:
        """Whether all clients count alike."""
        return self._weights == UNIFORM

    def shares(self, samples: Mapping[int, float]) -> dict[int, float]:
        """Compute the share of each client in the mean.

        Args:
            samples: The number of samples that each client claims, finite and above 0.

        Returns:
            The share of each client, 0 to 1; the shares add up to 1.
        """
        return shares_of({client: self.weight(client, claimed) for client, claimed in samples.items()})

    def weight(self, client: int, claimed: float) -> float:
        """Return how much a client counts, before the weights are divided by their sum.

        Args:
            client: Number of the client.
            claimed: The number of samples that it claims, finite and above 0.

        Returns:
            The weight, above 0.
        """
        if isinstance(self._weights, Mapping):
            return self._weights[client]
        return min(claimed, self._cap) if self._weights == SAMPLES else 1.0
