"""Values in the dtype in which libraries sum them as they are."""

import numpy as np

from .._util.scratch import scratch
from ..kernels import NON_FINITE
from ..kernels.half import fp16_decode, fp16_encode


def fp16_limit(ranks: int) -> np.float32:
    """Return the largest magnitude that a rank may send as float16.

    Args:
        ranks: Number of ranks.

    Returns:
        The magnitude, with which the sum over ranks cannot overflow: 1 % is for the rounding of the partial sums.
    """
    return np.float32(0.99 * float(np.finfo(np.float16).max) / ranks)


def to_reducible(gradient: np.ndarray, dtype: str, ranks: int) -> np.ndarray:
    """Copy values to the dtype in which they will be summed.

    float16 values saturate so that the sum over ranks cannot overflow. If a gradient is not finite, all of it becomes NaN.

    Args:
        gradient: float32[d].
        dtype: "float32" or "float16".
        ranks: Number of ranks.

    Returns:
        float32[d] or float16[d].
    """
    if dtype == "float32":
        return gradient.copy()
    sent = np.empty(gradient.size, dtype)
    if fp16_encode(gradient, fp16_limit(ranks), sent.view(np.uint16)) >= NON_FINITE:
        sent[:] = np.nan
    return sent


def from_reducible(summed: np.ndarray) -> np.ndarray:
    """Return a sum as float32.

    Args:
        summed: float32[d] or float16[d].

    Returns:
        float32[d]; `summed` itself, or a scratch array of the thread.
    """
    if summed.dtype == np.float32:
        return summed
    values = scratch("decoded fp16", np.float32, summed.size)
    fp16_decode(summed.view(np.uint16), values)
    return values
