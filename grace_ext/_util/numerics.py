"""What numpy may do without a warning, and rounding."""

import math

import numpy as np


def non_finite_allowed() -> np.errstate:
    """Let numpy compute with NaN and Inf, and overflow to Inf, without a warning.

    For sums of gradients: whoever encodes or reduces the sum finds the NaN or Inf and tells all ranks, which then end the
    step alike. A warning, which a filter may turn into an error, would end it on one rank only.

    Returns:
        A context manager, to be used once.
    """
    return np.errstate(over="ignore", invalid="ignore")


def power_of_two(value: float) -> float:
    """Round down to a power of two, so that ranks that add up in another order agree.

    Args:
        value: A number that is not negative.

    Returns:
        The largest power of two that is not above it; 1 for zero and what is not finite.
    """
    return 2.0 ** math.floor(math.log2(value)) if 0 < value < math.inf else 1.0
