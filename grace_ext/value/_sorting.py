"""What the codecs that fit curves have in common: the values sorted by sign and magnitude."""

import numpy as np

from .._util.scratch import scratch
from ..errors import ContainerError
from ..kernels.sort import argsort_bits


def sort_by_sign(values: np.ndarray) -> tuple[np.ndarray, list[np.ndarray]]:
    """Sort values by sign and magnitude.

    Args:
        values: float32[k].

    Returns:
        The order, uint32[k]: the place in `values` of each sorted value; and the two lists of magnitudes, those of values
        without and those of values with a sign, float32, ascending, k together, in a scratch array.
    """
    k = values.size
    order, ordered = np.empty(k, np.uint32), scratch("sorted values", np.float32, k)
    count = argsort_bits(values, scratch("sort", np.uint64, k), scratch("sort spare", np.uint64, k), order, ordered)
    np.abs(ordered, out=ordered)
    return order, [ordered[:count], ordered[count:]]


def check_magnitudes(codec: str, magnitudes: np.ndarray) -> None:
    """Check the magnitudes in a payload.

    Args:
        codec: Name of the codec, for messages.
        magnitudes: float32[n], n >= 1.

    Raises:
        ContainerError: They are not finite, not ascending, or negative.
    """
    if not np.isfinite(magnitudes).all() or magnitudes[0] < 0 or (magnitudes[1:] < magnitudes[:-1]).any():
        raise ContainerError(f"{codec}: the magnitudes are not finite and ascending")
