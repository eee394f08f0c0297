"""Index codec `varint`."""

import numpy as np

from ..errors import ContainerError
from ..kernels.varint import varint_bytes, varint_decode, varint_encode
from ..registry import register
from ._gaps import GapCounts
from .base import IndexCodec


@register
class Varint(IndexCodec):
    """LEB128 codes of the gaps: whole bytes, which any language reads in a few lines; 10.2 bits an index at 1 % density.

    The payload is one number for each gap (docs/container-format.md, "Index sections").

    Source:
        DWARF debugging information format, 1993 (its LEB128); Williams and Zobel, Compressing integers for fast file access,
        1999.
    """

    name, id = "varint", 8

    def encode(self, indices: np.ndarray, d: int) -> tuple[np.ndarray, np.ndarray]:
        size = varint_bytes(indices)
        payload = np.empty(size + 8, np.uint8)
        varint_encode(indices, payload)
        return payload[:size], indices

    def size(self, indices: np.ndarray, d: int) -> int:
        return varint_bytes(indices)

    def size_lower_bound(self, gaps: GapCounts) -> int:
        return gaps.indices.size

    @staticmethod
    def decode(payload: np.ndarray, d: int, out: np.ndarray) -> None:
        if not out.size <= payload.size <= 5 * out.size or not varint_decode(payload, d, out):
            raise ContainerError(f"varint: the section is not {out.size} positions below {d}")
