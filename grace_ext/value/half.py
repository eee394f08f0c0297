"""IEEE half precision, rounded to nearest even."""

import numpy as np

from ..errors import ContainerError
from ..registry import register
from .base import ValueCodec

LARGEST = np.float32(65504)


@register
class Half(ValueCodec):
    """Values beyond the range become +-65504 instead of Inf; with error feedback the rest follows in later steps."""

    name, id = "fp16", 2
    linear = "float16"

    def encode(self, values, stream):
        return np.clip(values, -LARGEST, LARGEST).astype("<f2").view(np.uint8), None

    @staticmethod
    def decode(payload, out):
        if payload.size != 2 * out.size:
            raise ContainerError(f"fp16 section: {payload.size} bytes for {out.size} values")
        out[:] = np.frombuffer(payload, "<f2")
