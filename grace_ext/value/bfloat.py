"""Value codec `bf16`."""

import numpy as np

from .._util.rng import Stream
from ..errors import ContainerError
from ..kernels.half import bf16_decode, bf16_encode
from ..registry import register
from .base import ValueCodec


@register
class BFloat16(ValueCodec):
    """bfloat16, the upper half of a float32, rounded to nearest even: the range of float32 at a precision of 8 bits.

    Values that would round to Inf become the largest finite one, about 3.39e38. The payload is k bfloat16
    (docs/container-format.md, "Value sections").
    """

    name, id = "bf16", 5

    def encode(self, values: np.ndarray, stream: Stream) -> tuple[np.ndarray, np.ndarray | None]:
        payload = np.empty(2 * values.size, np.uint8)
        bf16_encode(values, payload.view("<u2"))
        return payload, None

    @staticmethod
    def decode(payload: np.ndarray, out: np.ndarray) -> None:
        if payload.size != 2 * out.size:
            raise ContainerError(f"bf16 section: {payload.size} bytes for {out.size} values")
        bf16_decode(payload.view("<u2"), out)
