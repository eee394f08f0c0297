"""Value codec `threelc`."""

import numpy as np

from .._util.rng import Stream
from .._util.scratch import scratch
from ..errors import ConfigError, ContainerError
from ..kernels import max_magnitude
from ..kernels.ternary import fold_zeros, pack_fives, ternary_decode, ternary_nearest, unfold_zeros
from ..registry import register
from ._buckets import read_floats
from .base import ValueCodec
from .terngrad import read_fives


@register
class ThreeLC(ValueCodec):
    """3LC: each value becomes the nearest of -M, 0 and M, five values share a byte, and runs of zero bytes are folded.

    The result is biased, so it needs error feedback, which the paper calls error accumulation. Neighbours share a byte here,
    while the paper takes the five values from five fifths of the tensor. The payload holds M and the digits
    (docs/container-format.md, "Value sections" and "Digits").

    Args:
        s: The sparsity multiplier, from 1 to below 2. M is s times the largest magnitude, so a larger s gives more zeros.

    Source:
        Lim, Andersen and Kaminsky, 3LC: Lightweight and Effective Traffic Compression for Distributed Machine Learning,
        MLSys 2019.
    """

    name, id = "threelc", 13
    sweep = {"s": (1.0, 1.5, 1.9)}

    def __init__(self, s: float = 1.0):
        if not 1 <= s < 2:
            raise ConfigError(f"threelc: s={s}; allowed: from 1 to below 2")
        self.s = s

    def encode(self, values: np.ndarray, stream: Stream) -> tuple[np.ndarray, np.ndarray | None]:
        k = values.size
        largest = np.array([max_magnitude(values)], np.uint32).view(np.float32).astype(np.float64)
        scale = np.minimum(largest * self.s, np.finfo(np.float32).max).astype("<f4")
        bound = (largest * self.s / 2).astype(np.float32).view(np.uint32)
        digits = scratch("value levels", np.uint8, k)
        ternary_nearest(values, np.uint32(max(int(bound[0]), 1)), digits)  # not 0: a zero stays one
        payload = np.empty(4 + -(-k // 5), np.uint8)
        payload[:4] = scale.view(np.uint8)
        pack_fives(digits, payload[4:])
        return payload[: 4 + fold_zeros(payload[4:], payload.size - 4)], None

    @staticmethod
    def decode(payload: np.ndarray, out: np.ndarray) -> None:
        scale = read_floats("threelc", payload, 1)
        if scale[0] < 0:
            raise ContainerError("threelc: the scale is negative")
        packed = scratch("value fives", np.uint8, -(-out.size // 5))
        if not unfold_zeros(payload[4:], packed):
            raise ContainerError(f"threelc: the section does not hold {out.size} ternary digits")
        ternary_decode(read_fives("threelc", packed, out.size), out.size, scale, out)
