"""Memory `momentum`."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from .._util.rng import Stream
from ..errors import ConfigError
from ..pipeline.compressor import Compressor
from ..registry import register
from .arrays import Arrays
from .residual import Residual
from .velocity import Velocity


@register
class Momentum(Residual):
    """Compressed momentum: error feedback of each rank's first moment instead of its gradient, for Adam and its relatives.

    With m the first moment and e the residual of a rank: m = momentum · m + (1 - momentum) · g; e + m is compressed and sent;
    e keeps what was not. The optimizer gets the mean of what all ranks sent, must have no momentum of its own (beta1 = 0),
    and computes its second moment from that mean, so that an element that is sent once in a hundred steps is divided by what
    really arrives. Where a gradient with error feedback goes to an Adam with a momentum, each arrival shakes the first moment
    for 1 / (1 - beta1) steps. Tensors that are sent exactly have no memory: the optimizer keeps their first moment itself.

    Args:
        momentum: Factor of the first moment, Adam's beta1, from 0 to below 1.
        decay: Factor of the residual after each step, above 0 and at most 1.

    Source:
        Tang et al., 1-bit Adam, ICML 2021, section 3, compresses the momentum with error feedback, at a frozen second moment;
        with one that goes on: Fatkhullin, Tyurin and Richtárik, Momentum provably improves error feedback, NeurIPS 2023.
    """

    name = "momentum"
    supports_rows = False
    has_hooks = True
    corrects_gradient = True
    hooks_work_dense = True
    applies_momentum = True

    def __init__(self, momentum: float = 0.9, decay: float = 1.0):
        if not 0 <= momentum < 1:
            raise ConfigError(f"momentum: momentum={momentum}; allowed: from 0 to below 1")
        super().__init__(decay)
        self.momentum = self.first_moment = momentum
        self._first_moment = Velocity(momentum, 1 - momentum)
        self.states = {**self.states, **self._first_moment.states}

    @property
    def step_gain(self) -> float:
        """How much larger Adam's steps are than with a first moment of its own, where gradients are noise around zero.

        Adam divides by the root of the mean square of what arrives. That is (1 - momentum) / (1 + momentum) of a gradient's mean
        square for a momentum, while the sum of many steps' momenta is that of their gradients. A ratio of lengths, at least 1.
        """
        return math.sqrt((1 + self.momentum) / (1 - self.momentum))

    def compensate(self, name: str, gradient: np.ndarray) -> np.ndarray:
        raise ConfigError("memory 'momentum' changes with each step: use it in an exchange, or memory 'residual'")

    def correct_gradient(
        self, name: str, parts: Sequence[np.ndarray], out: np.ndarray, ranks: int, stream: Stream, density: float
    ) -> tuple[np.ndarray, None]:
        return self._first_moment.correct_gradient(name, parts, out, ranks, stream, density)

    def works_at_positions(self, compressor: Compressor) -> bool:
        return self._first_moment.works_at_positions(compressor)

    def correct_at(self, name: str, gradient: Any, sizes: Sequence[int], ranks: int, arrays: Arrays) -> None:
        self._first_moment.correct_at(name, gradient, sizes, ranks, arrays)

    def commit(self) -> None:
        super().commit()
        self._first_moment.commit()
