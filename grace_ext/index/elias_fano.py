"""Index codec `elias_fano`."""

import numpy as np

from ..errors import ContainerError
from ..kernels.elias_fano import elias_fano_decode, elias_fano_encode, elias_fano_select
from ..registry import register
from .base import IndexCodec


def low_width(d: int, k: int) -> int:
    """Return how many low bits of each position are stored as they are.

    Args:
        d: Number of elements of the domain.
        k: Number of positions, 1 <= k <= d.

    Returns:
        floor(log2(d / k)).
    """
    return (d // k).bit_length() - 1


@register
class EliasFano(IndexCodec):
    """Elias-Fano codes: half a bit above the bound for random positions. Any position can be read without the others.

    The payload is a stream of the positions' low bits and a stream with one set bit for each position
    (docs/container-format.md, "Index sections").

    Source:
        Elias, Efficient storage and retrieval by content and address of static files, 1974; Fano, On the number of bits
        required to implement an associative memory, 1971.
    """

    name, id = "elias_fano", 7

    def encode(self, indices: np.ndarray, d: int) -> tuple[np.ndarray, np.ndarray]:
        k = indices.size
        e, size = low_width(d, k), self.size(indices, d)
        split = (k * e + 7) // 8
        payload = np.empty(size + 8, np.uint8)
        highs = np.zeros(size - split, np.uint8)
        elias_fano_encode(indices, e, payload, highs)
        payload[split:size] = highs
        return payload[:size], indices

    def size(self, indices: np.ndarray, d: int) -> int:
        e = low_width(d, indices.size)
        return (indices.size * e + 7) // 8 + ((int(indices[-1]) >> e) + indices.size + 7) // 8

    @staticmethod
    def decode(payload: np.ndarray, d: int, out: np.ndarray) -> None:
        k = out.size
        e, lows, highs = _streams(payload, d, k)
        bits = elias_fano_decode(lows, highs, d, e, out)
        if bits < 0 or (bits + 7) // 8 != highs.size or (k * e % 8 and int(lows[-1]) >> k * e % 8):
            raise ContainerError(f"elias_fano: the section is not {k} positions below {d}")

    @staticmethod
    def position(payload: np.ndarray, d: int, k: int, i: int) -> int:
        """Read one position without decoding the others.

        Args:
            payload: uint8[m], the section.
            d: Number of elements of the domain.
            k: Number of positions.
            i: Which position to read, 0 <= i < k.

        Returns:
            The i-th position.

        Raises:
            IndexError: i is out of range.
            ContainerError: The section is certainly wrong. Damage that only decoding all of it would show goes unnoticed.
        """
        if not 0 <= i < k:
            raise IndexError(f"position {i} of {k}")
        e, lows, highs = _streams(payload, d, k)
        found = elias_fano_select(lows, highs, e, i)
        if not 0 <= found < d:
            raise ContainerError(f"elias_fano: position {i} is not below {d}")
        return found


def _streams(payload: np.ndarray, d: int, k: int) -> tuple[int, np.ndarray, np.ndarray]:
    """Return (e, low bits, high bits). Raises ContainerError if the length cannot be right."""
    e = low_width(d, k)
    split = (k * e + 7) // 8
    if not k <= 8 * (payload.size - split) < (d >> e) + k + 8:
        raise ContainerError(f"elias_fano: {payload.size} bytes cannot be {k} positions below {d}")
    return e, payload[:split], payload[split:]
