"""Value codec `fp16`."""

import numpy as np

from .._util.rng import Stream
from ..errors import ContainerError
from ..kernels.half import fp16_decode, fp16_encode
from ..registry import register
from .base import ValueCodec

LARGEST = np.float32(65504)


@register
class Half(ValueCodec):
    """IEEE half precision, rounded to nearest even.

    Values beyond the range become ±65504 instead of Inf; with error feedback, the rest follows in later steps. The payload
    is k float16 (docs/container-format.md, "Value sections").
    """

    name, id = "fp16", 2
    reducible_dtype = "float16"

    def encode(self, values: np.ndarray, stream: Stream) -> tuple[np.ndarray, np.ndarray | None]:
        payload = np.empty(2 * values.size, np.uint8)
        fp16_encode(values, LARGEST, payload.view("<u2"))
        return payload, None

    @staticmethod
    def decode(payload: np.ndarray, out: np.ndarray) -> None:
        if payload.size != 2 * out.size:
            raise ContainerError(f"fp16 section: {payload.size} bytes for {out.size} values")
        fp16_decode(payload.view("<u2"), out)
