"""Value codec `lloyd`."""

import numpy as np

from .._util.rng import Stream
from .._util.scratch import scratch
from ..errors import ConfigError, ContainerError
from ..kernels.lloyd import BINS, FRACTIONS, MOST, choose_levels, gather_escapes, lloyd_decode, lloyd_encode, moments
from ..registry import register
from ._levels import check_entropy, pack_levels, unpack_levels
from .base import ValueCodec

_HEAD = np.dtype([("most", "u1"), ("start", "<f4"), ("step", "<f4"), ("escapes", "<u4")])
_ESCAPE = 2 * MOST + 1
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
        error: The relative L2 error to aim at, 0.01 to 0.9. It is met within a few percent, and is smaller where a larger
            error would not save bits.
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
        k = values.size
        found, grid, fractions = np.empty(3), np.zeros(2, np.float32), np.empty(FRACTIONS, np.uint8)
        moments(values, found)
        most = 0
        codes = scratch("lloyd_codes", np.uint8, k)
        if found[0] > 0:
            sums = scratch("lloyd_sums", np.float64, 3 * (BINS + 1)).reshape(3, -1)
            most = choose_levels(values, found, self.error, sums, grid, fractions)
            lloyd_encode(values, grid, most, codes)
        else:
            codes[:] = 0
        escapes = np.empty(0, np.float32)
        if most == MOST:
            escapes = scratch("lloyd_escapes", np.float32, k)
            escapes = escapes[: gather_escapes(values, codes, _ESCAPE, escapes)]
        head = np.array([(most, *grid, escapes.size)], _HEAD).view(np.uint8)
        levels = pack_levels(codes, 2 * most + 1 + (escapes.size > 0), self.entropy)
        escapes = escapes.astype("<f4", copy=False).view(np.uint8)
        return np.concatenate([head, fractions[: min(most, FRACTIONS)], escapes, levels]), None

    @staticmethod
    def decode(payload: np.ndarray, out: np.ndarray) -> None:
        if payload.size < _HEAD.itemsize:
            raise ContainerError("lloyd: the parameters are missing")
        most, start, step, count = np.frombuffer(payload[: _HEAD.itemsize], _HEAD)[0].tolist()
        if not (most <= MOST and 0 <= start < np.inf and 0 <= step < np.inf and (count == 0 or most == MOST)):
            raise ContainerError("lloyd: a parameter is out of range")
        first = _HEAD.itemsize + min(most, FRACTIONS)
        second = first + 4 * count
        if payload.size < second:
            raise ContainerError(f"lloyd: {payload.size} bytes do not hold {count} values beyond the levels")
        escapes = np.frombuffer(payload[first:second], "<f4").astype(np.float32)
        if not np.isfinite(escapes).all():
            raise ContainerError("lloyd: a value is not finite")
        codes = scratch("lloyd_codes", np.uint8, out.size)
        unpack_levels(payload[second:], 2 * most + 1 + (count > 0), codes)
        table = np.zeros(256, np.float32)
        if most:
            m = np.arange(most)
            fractions = payload[_HEAD.itemsize : first][np.minimum(m, FRACTIONS - 1)]
            # In float64; at the very top a level could round to Inf.
            centroids = np.minimum(start + (m + (fractions + 0.5) / 256) * step, np.finfo(np.float32).max)
            with np.errstate(under="ignore"):  # levels may round to 0, whatever errors the caller has enabled
                table[most + 1 : 2 * most + 1] = centroids
            table[:most] = -table[2 * most : most : -1]
        if not lloyd_decode(codes, table, escapes, out):
            raise ContainerError("lloyd: the values beyond the levels are not as many as the levels say")
