"""Value codec `deflate`."""

import zlib
from typing import Any

import numpy as np

from .._util.rng import Stream
from ..errors import ConfigError, ContainerError
from ..registry import register
from .base import ValueCodec

try:
    # On 10^6 values of a heavy-tailed top 10 % ISA-L needs 28.8 bits and packs 190 M values/s, zlib's level 1 needs 29.0
    # bits at 8 M/s and its level 6 28.9 bits at 6 M/s. ISA-L unpacks 120 M values/s, zlib 45 M. (zlib-ng: 33.8 bits at
    # 29 M/s; libdeflate: 28.8 bits at 32 M/s.)
    from isal import isal_zlib

    fast: Any = isal_zlib
except ImportError:
    fast = zlib


@register
class Deflate(ValueCodec):
    """Deflate (RFC 1951) of the float32 values: lossless.

    The payload is a raw Deflate stream (docs/container-format.md, "Value sections"). Its bytes depend on the library that
    packs it: at level 1 on whether `isal` is installed, at higher levels on the version of zlib. All of them decode alike.

    Args:
        level: 1 (fast) to 9 (small). Level 1 is ISA-L's if `isal` is installed (the extra `deflate`). Higher levels are
            zlib's: they are slow, and pay off only where values repeat.

    Source:
        DeepReduce's DR-Deflate: Xu et al., DeepReduce: A Sparse-tensor Communication Framework for Federated Deep Learning,
        NeurIPS 2021, appendix, Table 3.
    """

    name, id = "deflate", 4
    sweep = {"level": (1, 6)}
    lossless = True

    def __init__(self, level: int = 1):
        if not 1 <= level <= 9:
            raise ConfigError(f"deflate: level={level}; allowed: 1 to 9")
        self.level = level

    def encode(self, values: np.ndarray, stream: Stream) -> tuple[np.ndarray, np.ndarray | None]:
        packer = (fast if self.level == 1 else zlib).compressobj(self.level, zlib.DEFLATED, -15)
        return np.frombuffer(packer.compress(values.astype("<f4", copy=False).data) + packer.flush(), np.uint8), None

    @staticmethod
    def decode(payload: np.ndarray, out: np.ndarray) -> None:
        size = 4 * out.size
        unpacker = fast.decompressobj(-15)
        try:
            # One byte more than expected, so that a longer stream is noticed but never unpacked.
            data = unpacker.decompress(payload.data, size + 1)
        except fast.error as error:
            raise ContainerError(f"deflate: {error}") from None
        if len(data) != size or not unpacker.eof or unpacker.unused_data:
            raise ContainerError(f"deflate: the stream does not hold exactly {out.size} values")
        out[:] = np.frombuffer(data, "<f4")
