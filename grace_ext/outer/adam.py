"""Outer optimizer `adam`."""

import math

import numpy as np

from ..errors import ConfigError
from ..registry import register
from .base import OuterOptimizer, check_factor, check_rate


@register
class Adam(OuterOptimizer):
    """Adam with the correction of both moments' bias, as torch.optim.Adam has it. FedAdam is the same without the correction.

    Args:
        lr: Learning rate, above 0.
        beta1: Factor of the first moment, from 0 to below 1.
        beta2: Factor of the second moment, from 0 to below 1.
        eps: Is added to the root of the second moment, above 0. Pseudo-gradients are small, so it matters more than in a
            gradient's Adam.

    Source:
        Kingma and Ba, Adam: a method for stochastic optimization, ICLR 2015, algorithm 1; for pseudo-gradients, with these
        defaults: Reddi et al., Adaptive federated optimization, ICLR 2021, algorithm 2.
    """

    name = "adam"
    fields = {"first_moment": 0.0, "second_moment": 0.0}

    def __init__(self, lr: float = 0.01, beta1: float = 0.9, beta2: float = 0.99, eps: float = 1e-3):
        self.lr = check_rate(self.name, lr)
        self.beta1, self.beta2 = check_factor(self.name, "beta1", beta1), check_factor(self.name, "beta2", beta2)
        if not 0 < eps < math.inf:
            raise ConfigError(f"{self.name}: eps={eps}; allowed: above 0 and finite")
        self.eps = eps

    def rate(self, number: int) -> float:
        """Return the learning rate of a step.

        Args:
            number: Number of the step, from 1 on.

        Returns:
            The rate.
        """
        return self.lr

    def step(self, values: np.ndarray, change: np.ndarray, state: dict[str, np.ndarray], number: int) -> None:
        first, second = state["first_moment"], state["second_moment"]
        first *= np.float32(self.beta1)
        first += np.float32(1 - self.beta1) * change
        second *= np.float32(self.beta2)
        change *= change
        second += np.float32(1 - self.beta2) * change
        np.sqrt(second, out=change)
        change /= np.float32(math.sqrt(1 - self.beta2**number))
        change += np.float32(self.eps)
        np.divide(first, change, out=change)
        change *= np.float32(self.rate(number) / (1 - self.beta1**number))
        values -= change
