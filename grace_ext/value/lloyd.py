"""Value codec `lloyd`."""

import math
import struct

import numpy as np

from .._util.rng import Stream
from .._util.scratch import scratch
from ..errors import ConfigError, ContainerError
from ..kernels.lloyd import FRACTIONS, MOST, dequantize, gather_escapes, quantize
from ..registry import register
from ._levels import check_entropy, pack_levels, unpack_levels
from .base import ValueCodec

_HEAD = struct.Struct("<BffI")  # levels on each side; start; step; number of values beyond the levels
_ESCAPE = 2 * MOST + 1
_NO_VALUES = np.empty(0, np.float32)
_SMALLEST_ERROR, _LARGEST_ERROR = 0.01, 0.9


@register
class Lloyd(ValueCodec):
    """Entropy-coded scalar quantization to a given error. No other codec here needs noticeably fewer bits at an equal error.

    The levels are equally spaced, with a dead zone around 0 or a gap up to the smallest magnitude, and decode to centroids.
    A uniform quantizer with an entropy code is within 0.255 bits of the rate-distortion bound (Gish and Pierce), and with a
    dead zone it comes closer still for Laplacian values (Sullivan). Nothing is stochastic: each value goes to a level near
    it, or to 0 if it is small, so the result is biased; error feedback compensates for that.

    The payload holds the grid, the centroids' offsets, values beyond the levels, and the levels (docs/container-format.md,
    "Value sections").

    Args:
        error: The relative L2 error to aim at, 0.01 to 0.9. It is met within a few percent from 1,000 values on, or from 200
            where it is at least 0.05, unless one value is nearly all of the norm. That of 20 values can be twice as large, and
            that of 2 to 10 five times. It is smaller where a larger error would not save bits.
        entropy: The lossless code of the levels: ans, huffman or none.

    Source:
        Lloyd, Least squares quantization in PCM, 1982; Gish and Pierce, Asymptotically efficient quantizing, 1968; Sullivan,
        Efficient scalar quantization of exponential and Laplacian random variables, 1996.
    """

    name, id = "lloyd", 14
    sweep = {"error": (0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3)}

    def __init__(self, error: float = 0.05, entropy: str = "ans"):
        if not _SMALLEST_ERROR <= error <= _LARGEST_ERROR:
            raise ConfigError(f"lloyd: error={error}; allowed: {_SMALLEST_ERROR} to {_LARGEST_ERROR}")
        self.error = error
        self.entropy = check_entropy("lloyd", entropy)

    def encode(self, values: np.ndarray, stream: Stream) -> tuple[np.ndarray, np.ndarray | None]:
        codes = scratch("lloyd_codes", np.uint8, values.size)
        head = scratch("lloyd_head", np.uint8, _HEAD.size + FRACTIONS)
        most, beyond = quantize(values, self.error, head, codes)
        first = _HEAD.size + min(most, FRACTIONS)
        second = first + 4 * beyond
        payload = pack_levels(codes, 2 * most + 1 + (beyond > 0), self.entropy, second)
        payload[:first] = head[:first]
        if beyond:
            escapes = scratch("lloyd_escapes", np.float32, beyond)
            gather_escapes(values, codes, _ESCAPE, escapes)
            payload[first:second] = escapes.astype("<f4", copy=False).view(np.uint8)
        return payload, None

    @staticmethod
    def parts(payload: np.ndarray, n: int) -> tuple[int, np.ndarray, np.ndarray, np.ndarray]:
        """Take a payload apart, and check it but for the number of values beyond the levels.

        Args:
            payload: uint8[m], any bytes.
            n: Number of values.

        Returns:
            The number of levels on each side; the grid and the centroids' offsets, uint8[h]; the values beyond the levels,
            float32[e]; and the code of each value, uint8[n], in a scratch array.

        Raises:
            ContainerError: The payload is not that of n values.
        """
        if payload.size < _HEAD.size:
            raise ContainerError("lloyd: the parameters are missing")
        most, start, step, count = _HEAD.unpack_from(payload.data)
        if not (most <= MOST and 0 <= start < math.inf and 0 <= step < math.inf and (count == 0 or most == MOST)):
            raise ContainerError("lloyd: a parameter is out of range")
        first = _HEAD.size + min(most, FRACTIONS)
        second = first + 4 * count
        if payload.size < second:
            raise ContainerError(f"lloyd: {payload.size} bytes do not hold {count} values beyond the levels")
        escapes = _NO_VALUES
        if count:
            escapes = np.frombuffer(payload[first:second], "<f4").astype(np.float32)
            if not np.isfinite(escapes).all():
                raise ContainerError("lloyd: a value is not finite")
        codes = scratch("lloyd_codes", np.uint8, n)
        unpack_levels(payload[second:], 2 * most + 1 + (count > 0), codes)
        return most, payload[:first], escapes, codes

    @staticmethod
    def values_of(head: np.ndarray, most: int, codes: np.ndarray, out: np.ndarray, escapes: np.ndarray = _NO_VALUES) -> bool:
        """Write the values of codes.

        Args:
            head: The grid and the centroids' offsets, as a payload begins with them.
            most: Number of levels on each side.
            codes: uint8[k].
            out: Output, float32[k].
            escapes: The values beyond the levels, in order.

        Returns:
            Whether there were as many values beyond the levels as codes for them; without any, such codes are 0.
        """
        _, start, step, _ = _HEAD.unpack_from(head.data)
        return dequantize(codes, start, step, head[_HEAD.size : _HEAD.size + min(most, FRACTIONS)], most, escapes, out)

    @staticmethod
    def decode(payload: np.ndarray, out: np.ndarray) -> None:
        most, head, escapes, codes = Lloyd.parts(payload, out.size)
        if not Lloyd.values_of(head, most, codes, out, escapes):
            raise ContainerError("lloyd: the values beyond the levels are not as many as the levels say")
