"""What numpy may do without a warning."""

import numpy as np


def non_finite_allowed() -> np.errstate:
    """Let numpy compute with NaN and Inf, and overflow to Inf, without a warning.

    For sums of gradients: whoever encodes or reduces the sum finds the NaN or Inf and tells all ranks, which then end the
    step alike. A warning, which a filter may turn into an error, would end it on one rank only.

    Returns:
        A context manager, to be used once.
    """
    return np.errstate(over="ignore", invalid="ignore")
