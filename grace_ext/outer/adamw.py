"""Outer optimizer `adamw`."""

import math

import numpy as np

from ..errors import ConfigError
from ..registry import register
from .adam import Adam


@register
class AdamW(Adam):
    """Adam with decoupled weight decay, as torch.optim.AdamW has it, for a server that gets gradients: Panthalia's.

    Args:
        lr: Learning rate, above 0.
        weight_decay: Share of the values, times the learning rate, that each step takes off; finite and not negative.
        steps: Number of steps over which the learning rate falls to 0 as a cosine; 0: it is constant.
        beta1: Factor of the first moment, from 0 to below 1.
        beta2: Factor of the second moment, from 0 to below 1.
        eps: Is added to the root of the second moment, above 0.

    Source:
        Loshchilov and Hutter, Decoupled weight decay regularization, ICLR 2019, algorithm 2, with its cosine; on a central
        server: Panthalia gradient compression algorithm, "Integration with Panthalia's centralized DDP".
    """

    name = "adamw"

    def __init__(
        self,
        lr: float = 0.001,
        weight_decay: float = 0.01,
        steps: int = 0,
        beta1: float = 0.9,
        beta2: float = 0.999,
        eps: float = 1e-8,
    ):
        super().__init__(lr, beta1, beta2, eps)
        if not 0 <= weight_decay < math.inf:
            raise ConfigError(f"adamw: weight_decay={weight_decay}; allowed: finite and not negative")
        if steps < 0:
            raise ConfigError(f"adamw: steps={steps}; allowed: from 0 on")
        self.weight_decay, self.steps = weight_decay, steps

    def rate(self, number: int) -> float:
        """Return the learning rate of a step.

        Args:
            number: Number of the step, from 1 on.

        Returns:
            The rate; 0 once all `steps` are over.
        """
        done = min(1.0, (number - 1) / self.steps) if self.steps else 0.0
        return self.lr * (1 + math.cos(math.pi * done)) / 2

    def step(self, values: np.ndarray, change: np.ndarray, state: dict[str, np.ndarray], number: int) -> None:
        values *= np.float32(1 - self.rate(number) * self.weight_decay)
        super().step(values, change, state, number)
