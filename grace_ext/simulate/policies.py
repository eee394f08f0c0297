"""How many bytes a message may have, and how they are divided among the layers: fixed, Kimad, Kimad+, and baselines.

Xin et al., Kimad: adaptive gradient compression with bandwidth awareness, DistributedML 2023, sections 3.1 and 3.2.
"""

import bisect
import math
from collections.abc import Sequence

import numpy as np

from ..errors import ConfigError
from ..pipeline.compressor import Compressor
from ..policy.allocation import DENSITIES, ErrorCurve, least_error
from ..policy.kimad import predict_sizes, uniform_density
from ..policy.schedules import with_density

_TRIED = 0.05  # the density with which sizes are first estimated


class FixedDensity:
    """Fixed densities, the same for all layers in every step.

    Args:
        up: Density from a worker to the server, above 0 and at most 1.
        down: Density from the server to a worker, above 0 and at most 1.

    Raises:
        ConfigError: A density is out of range.
    """

    label = "EF21"
    adaptive = False

    def __init__(self, up: float, down: float):
        for density in (up, down):
            if not 0 < density <= 1:
                raise ConfigError(f"density={density}; allowed: above 0, at most 1")
        self.up, self.down = up, down

    def allocate(self, sizes, differences, budget, direction) -> list[float]:
        """Choose a density for each layer.

        Args:
            sizes: For each layer, the bytes of a message with each of DENSITIES; not used here.
            differences: For each layer, float32[d], what is compressed.
            budget: Bytes of the whole message; not used here.
            direction: "up" or "down".

        Returns:
            The densities.
        """
        return [getattr(self, direction)] * len(differences)


EF21 = FixedDensity  # its former name


class GradientDescent(FixedDensity):
    """Everything is sent in every step: gradient descent without compression, if the values are exact."""

    label = "GD"

    def __init__(self):
        super().__init__(1.0, 1.0)


class Kimad:
    """Each direction gets half of what a step's computation leaves of the time; all layers get the same density.

    Args:
        seconds: Duration that a step should have, computation included; finite and above 0.

    Raises:
        ConfigError: `seconds` is out of range.
    """

    label = "Kimad"
    adaptive = True

    def __init__(self, seconds: float):
        if not (math.isfinite(seconds) and seconds > 0):
            raise ConfigError(f"seconds={seconds}; allowed: finite and above 0")
        self.seconds = seconds

    def allocate(
        self, sizes: Sequence[np.ndarray], differences: Sequence[np.ndarray], budget: float, direction: str
    ) -> list[float]:
        """Choose a density for each layer.

        Args:
            sizes: For each layer, the bytes of a message with each of DENSITIES.
            differences: For each layer, float32[d], what is compressed.
            budget: Bytes of the whole message.
            direction: "up" or "down"; it makes no difference.

        Returns:
            The densities.
        """
        return [uniform_density(sum(sizes), max(budget, 1.0))] * len(differences)


class KimadPlus(Kimad):
    """Kimad's budget, divided among the layers so that their total squared error is minimal."""

    label = "Kimad+"

    def allocate(self, sizes, differences, budget, direction):
        chosen = least_error([ErrorCurve(one) for one in differences], sizes, max(budget, 1.0))
        return [DENSITIES[choice] for choice in chosen]


class Optimal(Kimad):
    """Kimad's budget for the largest elements of all layers together: the baseline of Figure 9.

    As many of them are taken as the budget allows, by the sizes that are expected of each layer.
    """

    label = "optimal"

    def allocate(self, sizes, differences, budget, direction):
        ordered = [np.sort(np.abs(one))[::-1] for one in differences]
        joined = np.sort(np.concatenate(ordered))[::-1]

        def counts(k: int) -> list[int]:
            """Return how many of the k largest are in each layer."""
            return [max(1, int(np.searchsorted(-one, -joined[k - 1], side="right"))) for one in ordered]

        def nbytes(k: int) -> float:
            shares = [count / one.size for count, one in zip(counts(k), ordered, strict=True)]
            return sum(float(np.interp(share, DENSITIES, size)) for share, size in zip(shares, sizes, strict=True))

        k = bisect.bisect_right(range(1, joined.size), max(budget, 1.0), key=nbytes)
        return [count / one.size for count, one in zip(counts(max(1, k)), ordered, strict=True)]


class Sender:
    """One end of the links in one direction; it learns how many bytes containers take.

    Args:
        compressor: The compressor, which must have a density.
        layers: Number of elements of each layer.
        direction: "up" or "down".

    Raises:
        ConfigError: The compressor has no density.
    """

    def __init__(self, compressor: Compressor, layers: Sequence[int], direction: str = "up"):
        self._compressor, self._layers, self._direction = compressor, layers, direction
        random, tried = np.random.default_rng(0), with_density(compressor, _TRIED)
        #: For each layer, the bytes of a message with each of DENSITIES.
        self.sizes = [predict_sizes(tried.compress(random.standard_normal(d, np.float32)).size, _TRIED, d) for d in layers]

    def choose(self, policy, differences: Sequence[np.ndarray], budget: float) -> tuple[list[float], list[Compressor]]:
        """Choose a density and a compressor for each layer.

        Args:
            policy: One of this module's policies.
            differences: For each layer, float32[d], what is compressed.
            budget: Bytes of the whole message.

        Returns:
            The densities and the compressors.
        """
        self._said = [bool(one.any()) for one in differences]
        densities = policy.allocate(self.sizes, differences, budget, self._direction)
        return densities, [with_density(self._compressor, density) for density in densities]

    def sent(self, nbytes: Sequence[int], densities: Sequence[float]) -> None:
        """Learn from the messages made after `choose`. Layers whose difference was zero tell nothing about later messages.

        Args:
            nbytes: Bytes of each layer's message.
            densities: The densities from `choose`.
        """
        news = zip(nbytes, densities, self._layers, strict=True)
        self.sizes = [
            predict_sizes(*one) if said else known for one, said, known in zip(news, self._said, self.sizes, strict=True)
        ]
