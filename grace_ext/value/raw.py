"""Value codec `raw`."""

import numpy as np

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

    def encode(self, values, stream):
        return values.astype("<f4", copy=False).view(np.uint8), None

    @staticmethod
    def decode(payload, out):
        if payload.size != 4 * out.size:
            raise ContainerError(f"raw value section: {payload.size} bytes for {out.size} values")
        out[:] = np.frombuffer(payload, "<f4")
