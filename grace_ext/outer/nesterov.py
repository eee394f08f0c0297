"""Outer optimizer `nesterov`."""

import numpy as np

from ..registry import register
from .base import OuterOptimizer, check_factor, check_rate


@register
class Nesterov(OuterOptimizer):
    """SGD with Nesterov momentum: v = momentum v + change; values = values - lr (change + momentum v).

    Args:
        lr: Learning rate, above 0.
        momentum: Factor of the velocity, from 0 to below 1.

    Source:
        Douillard et al., DiLoCo: distributed low-communication training of language models, arXiv 2311.08105, section 3.1, in
        the form that torch.optim.SGD has.
    """

    name = "nesterov"
    fields = {"velocity": 0.0}

    def __init__(self, lr: float = 0.7, momentum: float = 0.9):
        self.lr, self.momentum = check_rate("nesterov", lr), check_factor("nesterov", "momentum", momentum)

    def step(self, values: np.ndarray, change: np.ndarray, state: dict[str, np.ndarray], number: int) -> None:
        velocity, momentum = state["velocity"], np.float32(self.momentum)
        velocity *= momentum
        velocity += change
        change += momentum * velocity
        change *= np.float32(self.lr)
        values -= change
