"""What the curve fits share: the values sorted by sign and magnitude."""

import numpy as np

from .._util.scratch import scratch
from ..errors import ContainerError
from ..kernels.sort import argsort_bits


def sort_by_sign(values: np.ndarray) -> tuple[np.ndarray, list[np.ndarray]]:
    """values: float32[k] -> (order uint32[k], [magnitudes of those without a sign, of those with one]).

    Both magnitudes are float32, ascending, together k, in a scratch array; order[i] is the place of the i-th in values.
    """
    k = values.size
    order, ordered = np.empty(k, np.uint32), scratch("sorted values", np.float32, k)
    count = argsort_bits(values, scratch("sort", np.uint64, k), scratch("sort spare", np.uint64, k), order, ordered)
    np.abs(ordered, out=ordered)
    return order, [ordered[:count], ordered[count:]]


def check_magnitudes(codec: str, magnitudes: np.ndarray) -> None:
    """Raise ContainerError unless they (float32[n], n >= 1) are finite, not negative and ascending."""
    if not np.isfinite(magnitudes).all() or magnitudes[0] < 0 or (magnitudes[1:] < magnitudes[:-1]).any():
        raise ContainerError(f"{codec}: the magnitudes are not finite and ascending")
