"""Value codec `dexp`."""

import numpy as np

from .._util.rng import Stream
from ..errors import ContainerError
from ..kernels.dexp import evaluate_exponentials, fit_exponentials
from ..registry import register
from ._sorting import check_magnitudes, sort_by_sign
from .base import ValueCodec

FIT = 6 * 4  # bytes: two edges, four parameters


@register
class DoubleExponential(ValueCodec):
    """Two exponentials, a e^(bx) + c e^(dx), fitted to the sorted values, separately for positive and negative ones.

    A linear regression on an integral equation gives b and d, and a second one gives a and c. As with `polyfit`, the order
    of the values costs ceil(log2 k) bits each. The payload holds the smallest and the largest magnitude and four parameters
    for each sign (docs/container-format.md, "Value sections").

    Source:
        DeepReduce's Fit-DExp: Xu et al., DeepReduce: A Sparse-tensor Communication Framework for Federated Deep Learning,
        NeurIPS 2021, section 5 and appendix E.
    """

    name, id = "dexp", 11

    def encode(self, values: np.ndarray, stream: Stream) -> tuple[np.ndarray, np.ndarray | None]:
        order, signs = sort_by_sign(values)
        parts = [np.array([signs[0].size], "<u4").view(np.uint8)]
        for magnitudes in signs:
            if magnitudes.size:
                parameters = np.empty(4, np.float32)
                fit_exponentials(magnitudes, parameters)
                parts.append(np.concatenate([magnitudes[[0, -1]], parameters]).astype("<f4").view(np.uint8))
        return np.concatenate(parts), order

    @staticmethod
    def decode(payload: np.ndarray, out: np.ndarray) -> None:
        count = int.from_bytes(payload[:4].tobytes(), "little")
        signs = [(False, out[:count]), (True, out[count:])]
        signs = [(negative, part) for negative, part in signs if part.size]
        if count > out.size or payload.size != 4 + FIT * len(signs):
            raise ContainerError(f"dexp: {payload.size} bytes for {count} of {out.size} values without a sign")
        numbers = payload[4:].view("<f4").astype(np.float32).reshape(len(signs), 6)
        if not np.isfinite(numbers).all():
            raise ContainerError("dexp: a parameter is not finite")
        for (negative, part), (low, high, *_), fit in zip(signs, numbers, numbers[:, 2:].copy(), strict=True):
            check_magnitudes("dexp", np.array([low, high]))
            evaluate_exponentials(fit, low, high, negative, part)
