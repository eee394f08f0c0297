"""Value codec `minmax`."""

import numpy as np

from .._util.rng import Stream
from .._util.scratch import scratch
from ..errors import ConfigError, ContainerError
from ..kernels.minmax import minmax_decode, minmax_encode
from ..registry import register
from ._buckets import read_floats
from ._levels import check_entropy, pack_levels, unpack_levels
from .base import ValueCodec


@register
class MinMax(ValueCodec):
    """Affine quantization: the nearest of 2**bits levels, evenly spaced from the smallest to the largest value.

    Unlike in the paper, the payload holds the extremes themselves, and there is no integer zero point. The result is biased.
    The payload holds both extremes of each chunk, and the levels (docs/container-format.md, "Value sections").

    Args:
        bits: Bits for each value, 1 to 8.
        chunk: Number of values that share a range, 2 to 2**31 - 1; 0: all.
        entropy: The lossless code of the levels: none, huffman or ans.
        per: Which values share a range. all: as many as `chunk` says; chunk: those that are sent of one chunk of the
            transform.

    Source:
        Jacob et al., Quantization and Training of Neural Networks for Efficient Integer-Arithmetic-Only Inference, CVPR
        2018, section 2.1.
    """

    name, id = "minmax", 6
    sweep = {"bits": (3, 4, 5, 6, 7, 8), "entropy": ("none", "ans")}

    def __init__(self, bits: int = 8, chunk: int = 0, entropy: str = "none", per: str = "all"):
        if not 1 <= bits <= 8:
            raise ConfigError(f"minmax: bits={bits}; allowed: 1 to 8")
        if chunk and not 2 <= chunk < 2**31:
            raise ConfigError(f"minmax: chunk={chunk}; allowed: 0 (all values), or 2 to 2147483647")
        if per not in ("all", "chunk"):
            raise ConfigError(f"minmax: per={per}; allowed: all, chunk")
        if chunk and per == "chunk":
            raise ConfigError(f"minmax: chunk={chunk} and per=chunk; only one of the two can say which values share a range")
        self.bits = bits
        self.chunk = chunk
        self.entropy = check_entropy("minmax", entropy)
        self.per = per

    @property
    def needs_chunks(self) -> bool:  # type: ignore[override]
        """Whether the values of each chunk of a transform have a range of their own."""
        return self.per == "chunk"

    def for_chunks(self, count: int) -> "MinMax":
        fitted = MinMax(self.bits, 0, self.entropy)
        fitted.chunk = count  # which may be 1
        return fitted

    def encode(self, values: np.ndarray, stream: Stream) -> tuple[np.ndarray, np.ndarray | None]:
        k = values.size
        chunk = self.chunk or k
        ranges = np.empty((-(-k // chunk), 2), np.float32)
        levels = scratch("value levels", np.uint8, k)
        minmax_encode(values, chunk, 2**self.bits - 1, ranges, levels)
        head = [np.array([self.bits], np.uint8), np.array([self.chunk], "<u4").view(np.uint8)]
        packed = pack_levels(levels, 2**self.bits, self.entropy)
        return np.concatenate([*head, ranges.astype("<f4", copy=False).reshape(-1).view(np.uint8), packed]), None

    @staticmethod
    def decode(payload: np.ndarray, out: np.ndarray) -> None:
        if payload.size < 5 or not 1 <= payload[0] <= 8:
            raise ContainerError("minmax: the parameters are missing or out of range")
        bits, k = int(payload[0]), out.size
        chunk = int.from_bytes(payload[1:5].tobytes(), "little") or k
        count = -(-k // chunk)
        ranges = read_floats("minmax", payload[5:], 2 * count).reshape(count, 2)
        if (ranges[:, 0] > ranges[:, 1]).any():
            raise ContainerError("minmax: a chunk's smallest value is above its largest")
        levels = scratch("value levels", np.uint8, k)
        unpack_levels(payload[5 + 8 * count :], 2**bits, levels)
        minmax_decode(levels, chunk, 2**bits - 1, ranges, out)
