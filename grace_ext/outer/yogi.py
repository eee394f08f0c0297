"""Outer optimizer `yogi`."""

import math

import numpy as np

from ..errors import ConfigError
from ..registry import register
from .base import OuterOptimizer, check_factor, check_rate


@register
class Yogi(OuterOptimizer):
    """FedYogi: Adam whose second moment changes by at most (1 - beta2) change² in a step, so that it does not forget quickly.

    m = beta1 m + (1 - beta1) change; v = v - (1 - beta2) change² sign(v - change²); values = values - lr m / (√v + tau).
    v begins with tau², and there is no correction of the bias.

    Args:
        lr: Learning rate, above 0.
        beta1: Factor of the first moment, from 0 to below 1.
        beta2: 1 - beta2 is the share by which the second moment changes; from 0 to below 1.
        tau: Is added to the root of the second moment, above 0.

    Source:
        Reddi et al., Adaptive federated optimization, ICLR 2021, algorithm 2 (FedYogi); Zaheer et al., Adaptive methods for
        nonconvex optimization, NeurIPS 2018.
    """

    name = "yogi"

    def __init__(self, lr: float = 0.01, beta1: float = 0.9, beta2: float = 0.99, tau: float = 1e-3):
        self.lr = check_rate("yogi", lr)
        self.beta1, self.beta2 = check_factor("yogi", "beta1", beta1), check_factor("yogi", "beta2", beta2)
        if not 0 < tau < math.inf:
            raise ConfigError(f"yogi: tau={tau}; allowed: above 0 and finite")
        self.tau = tau
        self.fields = {"first_moment": 0.0, "second_moment": tau * tau}

    def step(self, values: np.ndarray, change: np.ndarray, state: dict[str, np.ndarray], number: int) -> None:
        first, second = state["first_moment"], state["second_moment"]
        first *= np.float32(self.beta1)
        first += np.float32(1 - self.beta1) * change
        change *= change
        signs = np.sign(second - change)
        change *= np.float32(1 - self.beta2)
        change *= signs
        second -= change
        np.sqrt(second, out=change)
        change += np.float32(self.tau)
        np.divide(first, change, out=change)
        change *= np.float32(self.lr)
        values -= change
