"""Index codec `shared`."""

import struct

import numpy as np

from ..errors import ContainerError
from ..kernels import draw_positions
from ..registry import register
from .base import IndexCodec


@register
class Shared(IndexCodec):
    """Positions that the receiver draws again from the sender's key: 8 bytes, however many there are.

    It works only with sparsifiers whose positions come from a seed that all ranks have in common, such as `randomk`; there,
    `auto` stands for it. The payload is the key (docs/container-format.md, "Index sections").

    Source:
        Konečný et al., Federated learning: strategies for improving communication efficiency, 2016 (random masks sent as a
        seed).
    """

    name, id = "shared", 10
    universal = False

    @staticmethod
    def section(key: tuple[int, int]) -> np.ndarray:
        """Encode a key.

        Args:
            key: The key with which the positions were drawn, two uint32.

        Returns:
            The payload, uint8[8].
        """
        return np.frombuffer(struct.pack("<II", *key), np.uint8)

    @staticmethod
    def decode(payload: np.ndarray, d: int, out: np.ndarray) -> None:
        if payload.size != 8:
            raise ContainerError(f"shared: a key has 8 bytes, not {payload.size}")
        low, high = struct.unpack("<II", payload.tobytes())
        draw_positions(out, d, low, high)
