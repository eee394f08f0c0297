"""Deflate (RFC 1951) of float32 values: lossless, as in DeepReduce's DR-Deflate (appendix, Table 3)."""

import zlib

import numpy as np

from ..errors import ConfigError, ContainerError
from ..registry import register
from .base import ValueCodec


@register
class Deflate(ValueCodec):
    """level: 1 (fast) to 9 (small)."""

    name, id = "deflate", 4
    lossless = True

    def __init__(self, level: int = 6):
        if not 1 <= level <= 9:
            raise ConfigError(f"deflate: level={level}; allowed: 1 to 9")
        self.level = level

    def encode(self, values, stream):
        packer = zlib.compressobj(self.level, zlib.DEFLATED, -15)
        return np.frombuffer(packer.compress(values.astype("<f4", copy=False).data) + packer.flush(), np.uint8), None

    @staticmethod
    def decode(payload, out):
        size = 4 * out.size
        unpacker = zlib.decompressobj(-15)
        try:
            # One byte more than expected, so that a longer stream is noticed but never unpacked.
            data = unpacker.decompress(payload.data, size + 1)
        except zlib.error as error:
            raise ContainerError(f"deflate: {error}") from None
        if len(data) != size or not unpacker.eof or unpacker.unused_data:
            raise ContainerError(f"deflate: the stream does not hold exactly {out.size} values")
        out[:] = np.frombuffer(data, "<f4")
