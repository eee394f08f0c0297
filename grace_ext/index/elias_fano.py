"""Elias-Fano: half a bit above the bound for random positions, and any position can be read without the others.

Elias, Efficient storage and retrieval by content and address of static files, 1974; Fano, On the number of bits
required to implement an associative memory, 1971.
"""

import numpy as np

from ..errors import ContainerError
from ..kernels.elias_fano import elias_fano_decode, elias_fano_encode, elias_fano_select
from ..registry import register
from .base import IndexCodec


def low_width(d: int, k: int) -> int:
    """floor(log2(d / k)): the bits of each position that are stored as they are."""
    return (d // k).bit_length() - 1


@register
class EliasFano(IndexCodec):
    name, id = "elias_fano", 7

    def encode(self, indices, d):
        k = indices.size
        e, size = low_width(d, k), self.size(indices, d)
        split = (k * e + 7) // 8
        payload = np.empty(size + 8, np.uint8)
        highs = np.zeros(size - split, np.uint8)
        elias_fano_encode(indices, e, payload, highs)
        payload[split:size] = highs
        return payload[:size], indices

    def size(self, indices, d):
        e = low_width(d, indices.size)
        return (indices.size * e + 7) // 8 + ((int(indices[-1]) >> e) + indices.size + 7) // 8

    @staticmethod
    def decode(payload, d, out):
        k = out.size
        e, lows, highs = _streams(payload, d, k)
        bits = elias_fano_decode(lows, highs, d, e, out)
        if bits < 0 or (bits + 7) // 8 != highs.size or (k * e % 8 and int(lows[-1]) >> k * e % 8):
            raise ContainerError(f"elias_fano: the section is not {k} positions below {d}")

    @staticmethod
    def position(payload: np.ndarray, d: int, k: int, i: int) -> int:
        """The i-th of the k positions, 0 <= i < k, read from uint8[m] without decoding the others.

        Raises IndexError for another i and ContainerError for a section that cannot be right; what only a full
        decoding would notice stays unnoticed.
        """
        if not 0 <= i < k:
            raise IndexError(f"position {i} of {k}")
        e, lows, highs = _streams(payload, d, k)
        found = elias_fano_select(lows, highs, e, i)
        if not 0 <= found < d:
            raise ContainerError(f"elias_fano: position {i} is not below {d}")
        return found


def _streams(payload, d, k):
    """(e, lows, highs); ContainerError if the length cannot be right."""
    e = low_width(d, k)
    split = (k * e + 7) // 8
    if not k <= 8 * (payload.size - split) < (d >> e) + k + 8:
        raise ContainerError(f"elias_fano: {payload.size} bytes cannot be {k} positions below {d}")
    return e, payload[:split], payload[split:]
