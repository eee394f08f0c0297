"""The interface of outer optimizers."""

import math

import numpy as np

from ..errors import ConfigError
from ..registry import Stage


class OuterOptimizer(Stage):
    """A step with a pseudo-gradient: what the values were at the start of a round minus what they have become, mean over ranks.

    It keeps no state of its own, so one object serves any number of tensors. The arithmetic is numpy's element by element,
    where each operation is rounded as IEEE 754 says; so all ranks get the same bits whatever their processors are. A compiled
    loop could contract a product and a sum into one operation on some machines only.
    """

    kind = "outer"
    #: The vectors that are kept for each tensor, by field, with what their elements begin with.
    fields: dict[str, float] = {}

    def begin(self, size: int) -> dict[str, np.ndarray]:
        """Make the state before the first step.

        Args:
            size: Number of elements of the tensor.

        Returns:
            field -> float32[size].
        """
        return {field: np.full(size, value, np.float32) for field, value in self.fields.items()}

    def step(self, values: np.ndarray, change: np.ndarray, state: dict[str, np.ndarray], number: int) -> None:
        """Make a step.

        Args:
            values: What the ranks share, float32[d]; changed in place.
            change: The pseudo-gradient, float32[d], finite; it may be overwritten.
            state: What `begin` returned for this tensor; changed in place.
            number: Number of the step, from 1 on.
        """
        raise NotImplementedError


def check_rate(name: str, lr: float) -> float:
    """Check a learning rate.

    Args:
        name: Name of the outer optimizer, for the message.
        lr: The learning rate.

    Returns:
        The learning rate.

    Raises:
        ConfigError: It is not finite or not above 0.
    """
    if not 0 < lr < math.inf:
        raise ConfigError(f"{name}: lr={lr}; allowed: above 0 and finite")
    return lr


def check_factor(name: str, option: str, factor: float) -> float:
    """Check the factor of a moving average or of a momentum.

    Args:
        name: Name of the outer optimizer, for the message.
        option: Name of its option, for the message.
        factor: The factor.

    Returns:
        The factor.

    Raises:
        ConfigError: It is not from 0 to below 1.
    """
    if not 0 <= factor < 1:
        raise ConfigError(f"{name}: {option}={factor}; allowed: from 0 to below 1")
    return factor
