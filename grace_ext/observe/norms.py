"""Norms of what listeners are shown: arrays of numpy, and tensors of other libraries."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np


def energy(array: Any) -> float:
    """Compute the sum of squares.

    Args:
        array: float32[n] of numpy, or a tensor with a method `norm`.

    Returns:
        The sum; inf or nan where it does not fit float32.
    """
    if isinstance(array, np.ndarray):
        with np.errstate(over="ignore", invalid="ignore"):
            return float(np.dot(array, array))
    return float(array.norm()) ** 2


def lag(energies: Sequence[tuple[float, float]]) -> float | None:
    """Compute the lag: the energy of residuals over that of gradients.

    Where gradients are mostly noise it is the number of steps whose gradients wait to be sent, because the energies of
    independent gradients add up.

    Args:
        energies: Those of the gradient and of the residual, for each tensor.

    Returns:
        The lag; None if it is no number, or there are no tensors.
    """
    gradient, residual = (math.fsum(column) for column in zip(*energies, strict=True)) if energies else (0.0, 0.0)
    return residual / gradient if gradient > 0 and math.isfinite(residual / gradient) else None
