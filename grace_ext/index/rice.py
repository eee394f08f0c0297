"""Index codec `rice`."""

import functools
import math

import numpy as np

from ..errors import ContainerError
from ..kernels import quotient_bits, rice_decode, rice_encode
from ..kernels._helpers import MAX_SHIFT
from ..kernels.rice import quotient_room, remainder_bytes
from ..registry import register
from .base import IndexCodec


@functools.lru_cache(maxsize=1024)  # the same numbers come again in each step
def best_shift(d: int, k: int) -> int:
    """Return the parameter of the Rice code that is expected to be the shortest.

    Args:
        d: Number of elements of the domain.
        k: Number of positions; each element is assumed to be one with probability k / d.

    Returns:
        The parameter e, 0 to MAX_SHIFT.
    """
    if k >= d:
        return 0
    log_empty = math.log1p(-k / d)  # logarithm of the probability that an element is not selected

    def expected_bits(e: int) -> float:
        return e + 1 + 1 / math.expm1(-log_empty * (1 << e))

    e = max(0, (d // k).bit_length() - 3)  # below the best one, up to which the bits only fall
    while e < MAX_SHIFT and expected_bits(e + 1) < expected_bits(e):
        e += 1
    return e


@register
class Rice(IndexCodec):
    """Rice codes of the gaps: within 2 % of log2 C(d, k) bits where positions are uniformly random.

    The payload holds the parameter e, a stream of the gaps' lower e bits, and a stream of their upper bits in unary
    (docs/container-format.md, "Index sections").

    Source:
        Rice and Plaunt, Some practical universal noiseless coding techniques, 1971; Golomb, Run-length encodings, 1966.
    """

    name, id = "rice", 3

    def encode(self, indices: np.ndarray, d: int) -> tuple[np.ndarray, np.ndarray]:
        k = indices.size
        e = best_shift(d, k)
        split = 1 + remainder_bytes(k, e)
        payload = np.empty(split + 8 + quotient_room(d, k, e), np.uint8)
        quotients = np.empty(quotient_room(d, k, e), np.uint8)
        end = split + (rice_encode(indices, e, payload[1:], quotients) + 7) // 8
        payload[0] = e
        payload[split:end] = quotients[: end - split]
        return payload[:end], indices

    def size(self, indices: np.ndarray, d: int) -> int:
        e = best_shift(d, indices.size)
        return 1 + remainder_bytes(indices.size, e) + (quotient_bits(indices, e) + 7) // 8

    @staticmethod
    def parts(payload: np.ndarray, d: int, k: int) -> tuple[int, np.ndarray, np.ndarray]:
        """Take a payload apart, and check everything but the codes.

        Args:
            payload: uint8[m], any bytes.
            d: Number of elements of the domain that the positions are in.
            k: Number of positions, k >= 1.

        Returns:
            The parameter e, the stream of the gaps' lower bits, and that of their upper bits, both uint8[m'].

        Raises:
            ContainerError: The payload is not that of k positions below d.
        """
        if payload.size < 2 or payload[0] > MAX_SHIFT:
            raise ContainerError("rice: the parameter is missing or out of range")
        e = int(payload[0])
        split = 1 + remainder_bytes(k, e)
        room = payload.size - split
        if not k <= 8 * room < (d >> e) + k + 8:
            raise ContainerError(f"rice: {payload.size} bytes cannot be {k} codes")
        if k * e % 8 and int(payload[split - 1]) >> k * e % 8:
            raise ContainerError(f"rice: the codes are not {k} positions below {d}")
        return e, payload[1:split], payload[split:]

    @staticmethod
    def decode(payload: np.ndarray, d: int, out: np.ndarray) -> None:
        k = out.size
        e, remainders, quotients = Rice.parts(payload, d, k)
        bits = rice_decode(remainders, quotients, d, e, out)
        if bits < 0 or (bits + 7) // 8 != quotients.size:
            raise ContainerError(f"rice: the codes are not {k} positions below {d}")
