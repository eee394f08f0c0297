"""Positions that the receiver draws again from the sender's key: 8 bytes, however many there are.

For sparsifiers whose positions come from a seed that all ranks have in common, as random-k does: Konečný et al.,
Federated learning: strategies for improving communication efficiency, 2016 (random masks sent as a seed).
"""

import struct

import numpy as np

from ..errors import ContainerError
from ..kernels import draw_positions
from ..registry import register
from .base import IndexCodec


@register
class Shared(IndexCodec):
    """No options; only for `randomk`, where it is what `auto` stands for."""

    name, id = "shared", 10
    universal = False

    @staticmethod
    def section(key: tuple[int, int]) -> np.ndarray:
        """uint8[8] for positions that were drawn with this key, two uint32."""
        return np.frombuffer(struct.pack("<II", *key), np.uint8)

    @staticmethod
    def decode(payload, d, out):
        if payload.size != 8:
            raise ContainerError(f"shared: a key has 8 bytes, not {payload.size}")
        low, high = struct.unpack("<II", payload.tobytes())
        draw_positions(out, d, low, high)
