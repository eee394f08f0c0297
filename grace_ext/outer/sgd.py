"""Outer optimizer `sgd`."""

import numpy as np

from ..registry import register
from .base import OuterOptimizer, check_factor, check_rate


@register
class SGD(OuterOptimizer):
    """Subtracts the pseudo-gradient, or with a momentum v = momentum v + change, times lr. With lr=1 it averages the ranks.

    Args:
        lr: Learning rate, above 0.
        momentum: Factor of the velocity, from 0 to below 1.

    Source:
        McMahan et al., Communication-efficient learning of deep networks from decentralized data, AISTATS 2017 (FedAvg, lr=1);
        with a momentum: Hsu, Qi and Brown, Measuring the effects of non-identical data distribution for federated visual
        classification, 2019 (FedAvgM).
    """

    name = "sgd"

    def __init__(self, lr: float = 1.0, momentum: float = 0.0):
        self.lr, self.momentum = check_rate("sgd", lr), check_factor("sgd", "momentum", momentum)
        self.fields = {"velocity": 0.0} if momentum else {}

    def step(self, values: np.ndarray, change: np.ndarray, state: dict[str, np.ndarray], number: int) -> None:
        if self.momentum:
            velocity = state["velocity"]
            velocity *= np.float32(self.momentum)
            velocity += change
            np.copyto(change, velocity)
        if self.lr != 1:
            change *= np.float32(self.lr)
        values -= change
