"""Index codec `raw`."""

import numpy as np

from ..errors import ContainerError
from ..registry import register
from .base import IndexCodec


@register
class RawIndex(IndexCodec):
    """The positions as they are, 32 bits each.

    The payload is k uint32 (docs/container-format.md, "Index sections").
    """

    name, id = "raw", 1

    def encode(self, indices: np.ndarray, d: int) -> tuple[np.ndarray, np.ndarray]:
        return indices.astype("<u4", copy=False).view(np.uint8), indices

    def size(self, indices: np.ndarray, d: int) -> int:
        return 4 * indices.size

    @staticmethod
    def decode(payload: np.ndarray, d: int, out: np.ndarray) -> None:
        if payload.size != 4 * out.size:
            raise ContainerError(f"raw index section: {payload.size} bytes for {out.size} positions")
        out[:] = np.frombuffer(payload, "<u4")
        if out[-1] >= d or not (out[1:] > out[:-1]).all():
            raise ContainerError("raw index section: the positions are not ascending below d")
