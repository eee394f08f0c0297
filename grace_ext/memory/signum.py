"""Memory `signum`."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from .._util.rng import Stream
from ..errors import ConfigError
from ..pipeline.compressor import Compressor
from ..registry import register
from .arrays import Arrays
from .base import Memory
from .velocity import Velocity


@register
class Signum(Velocity):
    """The momentum of signSGD: each gradient is replaced by a moving average, and no error is fed back.

    m = momentum · m + (1 - momentum) · g, and the first m of all is the first gradient, as GRACE has it. It is meant for value
    codec `sign:one`, and the optimizer must have no momentum of its own.

    Args:
        momentum: Factor of the moving average, from 0 to below 1.

    Source:
        Bernstein, Wang, Azizzadenesheli and Anandkumar, signSGD: compressed optimisation for non-convex problems, ICML 2018,
        Algorithm 2; Xu et al., GRACE, ICDCS 2021.
    """

    name = "signum"
    suits_votes = True

    def __init__(self, momentum: float = 0.9):
        if not 0 <= momentum < 1:
            raise ConfigError(f"signum: momentum={momentum}; allowed: from 0 to below 1")
        super().__init__(momentum, 1 - momentum)

    def for_compressor(self, compressor: Compressor) -> Memory:
        return self

    def works_at_positions(self, compressor: Compressor) -> bool:
        return True

    def correct_gradient(
        self, name: str, parts: Sequence[np.ndarray], out: np.ndarray, ranks: int, stream: Stream, density: float
    ) -> tuple[np.ndarray, None]:
        if self._velocity.find(name, out.size) is not None:
            return super().correct_gradient(name, parts, out, ranks, stream, density)
        first = self._velocity.begin(name, out.size)[1]
        np.concatenate(parts, out=first)
        return first, None

    def correct_at(self, name: str, gradient: Any, sizes: Sequence[int], ranks: int, arrays: Arrays) -> None:
        if self._velocity.find(name, len(gradient)) is not None:
            super().correct_at(name, gradient, sizes, ranks, arrays)
        else:
            self._velocity.begin(name, len(gradient), arrays)[1][:] = gradient
