"""Index codec `bitmap`."""

import numpy as np

from ..errors import ContainerError
from ..kernels import bitmap_decode, bitmap_encode
from ..registry import register
from .base import IndexCodec


@register
class Bitmap(IndexCodec):
    """One bit for each element. It is the shortest where more than about a third of the positions are in the support.

    The payload is ceil(d / 8) bytes (docs/container-format.md, "Index sections").
    """

    name, id = "bitmap", 2

    def encode(self, indices: np.ndarray, d: int) -> tuple[np.ndarray, np.ndarray]:
        payload = np.zeros((d + 7) // 8, np.uint8)
        bitmap_encode(indices, payload)
        return payload, indices

    def size(self, indices: np.ndarray, d: int) -> int:
        return (d + 7) // 8

    @staticmethod
    def decode(payload: np.ndarray, d: int, out: np.ndarray) -> None:
        if payload.size != (d + 7) // 8:
            raise ContainerError(f"bitmap: {payload.size} bytes for {d} positions")
        if bitmap_decode(payload, out) != out.size or out[-1] >= d:
            raise ContainerError(f"bitmap: not {out.size} bits set below {d}")
