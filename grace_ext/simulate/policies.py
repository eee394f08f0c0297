"""How many bytes a message may have, and what its layers get of them: fixed, Kimad, Kimad+.

Xin et al., Kimad: adaptive gradient compression with bandwidth awareness, DistributedML 2023, sections 3.1 and 3.2.
"""

import math
from collections.abc import Sequence

import numpy as np

from ..errors import ConfigError
from ..pipeline.compressor import Compressor
from ..policy.allocation import DENSITIES, ErrorCurve, least_error
from ..policy.kimad import sizes_like, uniform
from ..policy.schedules import Schedules

_TRIED = 0.05  # a density
_WITH = Schedules({"density": "kimad"})


class EF21:
    """density: of all layers in every step, worker to server and server to worker."""

    label = "EF21"
    adaptive = False

    def __init__(self, up: float, down: float):
        for density in (up, down):
            if not 0 < density <= 1:
                raise ConfigError(f"density={density}; allowed: above 0, at most 1")
        self.up, self.down = up, down

    def allocate(self, sizes, differences, budget, direction) -> list[float]:
        return [getattr(self, direction)] * len(differences)


class Kimad:
    """seconds: of a step, computation included. Each direction gets half of what computation leaves; all layers get the
    same density."""

    label = "Kimad"
    adaptive = True

    def __init__(self, seconds: float):
        if not (math.isfinite(seconds) and seconds > 0):
            raise ConfigError(f"seconds={seconds}; allowed: finite and above 0")
        self.seconds = seconds

    def allocate(
        self, sizes: Sequence[np.ndarray], differences: Sequence[np.ndarray], budget: float, direction: str
    ) -> list[float]:
        """A density for each layer. sizes: of each layer, bytes with each of DENSITIES. differences: float32[d] each.
        budget: bytes. direction: "up" or "down"."""
        return [uniform(sum(sizes), max(budget, 1.0))] * len(differences)


class KimadPlus(Kimad):
    """The same budget, so spread over the layers that the squared error of all of them is the least."""

    label = "Kimad+"

    def allocate(self, sizes, differences, budget, direction):
        chosen = least_error([ErrorCurve(one) for one in differences], sizes, max(budget, 1.0))
        return [DENSITIES[choice] for choice in chosen]


class Sender:
    """One end of a link in one direction: has seen what its containers take."""

    def __init__(self, compressor: Compressor, layers: Sequence[int], direction: str = "up"):
        if "density" not in compressor.sparsifier.options():
            raise ConfigError(f"{str(compressor)!r} has no density that a policy could choose")
        self._compressor, self._layers, self._direction = compressor, layers, direction
        random, tried = np.random.default_rng(0), _WITH.at(compressor, 0, _TRIED)
        #: Of each layer, bytes with each of DENSITIES.
        self.sizes = [sizes_like(tried.compress(random.standard_normal(d, np.float32)).size, _TRIED, d) for d in layers]

    def choose(self, policy, differences: Sequence[np.ndarray], budget: float) -> tuple[list[float], list[Compressor]]:
        """A density and a compressor for each layer."""
        self._said = [bool(one.any()) for one in differences]
        densities = policy.allocate(self.sizes, differences, budget, self._direction)
        return densities, [_WITH.at(self._compressor, 0, density) for density in densities]

    def sent(self, nbytes: Sequence[int], densities: Sequence[float]) -> None:
        """Bytes of each layer's message after `choose`. Those that had nothing to say tell nothing of the others."""
        news = zip(nbytes, densities, self._layers, strict=True)
        self.sizes = [
            sizes_like(*one) if said else known for one, said, known in zip(news, self._said, self.sizes, strict=True)
        ]
