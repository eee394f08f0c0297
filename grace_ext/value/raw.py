"""Value codec `raw`."""

import numpy as np

from .._util.rng import Stream
from ..errors import ContainerError
from ..registry import register
from .base import ValueCodec


@register
class RawValue(ValueCodec):
    """The float32 values as they are.

    The payload is k float32 (docs/container-format.md, "Value sections").
    """

    name, id = "raw", 1
    lossless = True
    reducible_dtype = "float32"

    def encode(self, values: np.ndarray, stream: Stream) -> tuple[np.ndarray, np.ndarray | None]:
        return values.astype("<f4", copy=False).view(np.uint8), None

    @staticmethod
    def decode(payload: np.ndarray, out: np.ndarray) -> None:
        if payload.size != 4 * out.size:
            raise ContainerError(f"raw value section: {payload.size} bytes for {out.size} values")
        out[:] = np.frombuffer(payload, "<f4")
