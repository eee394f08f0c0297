"""Index codec `rows`."""

import struct

import numpy as np

from .._util.scratch import scratch
from ..errors import ConfigError, ContainerError
from ..kernels.rows import join_rows, split_rows, whole_rows
from ..registry import register
from ._parts import ALL, EMPTY, decode_part, elements_of, encode_part, row_count
from .base import IndexCodec

_HEAD = struct.Struct("<BBIII")  # codecs of rows and of positions; width; number of rows; bytes of the rows' section


@register
class Rows(IndexCodec):
    """Positions in the rows of a table: the touched rows, and the positions within them unless these are all.

    It is meant for gradients of embeddings, of which a step touches some rows: the sparse gradients of PyTorch and
    TensorFlow, with fewer bytes for the rows, and with a choice within them. Both parts are encoded by the codecs that
    `auto` chooses.

    The payload holds the ids of these two codecs, the width, the number of touched rows and the two sections
    (docs/container-format.md, "Index sections").

    Args:
        width: Number of elements of a row, at least 1. Gradients that come as rows use their own width.
    """

    name, id = "rows", 11
    composite = True

    def __init__(self, width: int = 64):
        if not 1 <= width < 2**31:
            raise ConfigError(f"rows: width={width}; allowed: from 1 on and below 2**31")
        self.width = width

    def encode(self, indices: np.ndarray, d: int) -> tuple[np.ndarray, np.ndarray]:
        return self.section(*self.split(indices), d), indices

    def split(self, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Split positions into touched rows and positions within them.

        Args:
            indices: uint32[k], strictly ascending.

        Returns:
            The touched rows, uint32[r], and the positions in the domain of only these rows, uint32[k]; both in scratch
            arrays.
        """
        rows, compact = (scratch(name, np.uint32, indices.size) for name in ("touched rows", "compact"))
        return rows[: split_rows(indices, self.width, rows, compact)], compact

    def section(self, rows: np.ndarray, compact: np.ndarray | None, d: int) -> np.ndarray:
        """Encode touched rows and the positions within them.

        Args:
            rows: The touched rows, uint32[r], strictly ascending.
            compact: The positions in the domain of only these rows, uint32[k], k >= 1; None for all positions of these rows.
            d: Number of elements of the table.

        Returns:
            The payload, uint8[m].
        """
        row_codec, row_section = encode_part(rows, row_count(d, self.width))
        codec, section = (ALL, EMPTY) if compact is None else encode_part(compact, elements_of(rows, self.width, d))
        head = _HEAD.pack(row_codec, codec, self.width, rows.size, row_section.size)
        return np.concatenate([np.frombuffer(head, np.uint8), row_section, section])

    @staticmethod
    def decode(payload: np.ndarray, d: int, out: np.ndarray) -> None:
        if payload.size < _HEAD.size:
            raise ContainerError("rows: the section is too short")
        row_codec, codec, width, touched, row_bytes = _HEAD.unpack(payload[: _HEAD.size].tobytes())
        if width == 0 or not 1 <= touched <= min(out.size, row_count(d, width)):
            raise ContainerError(f"rows: {touched} rows of {width} are not those of {out.size} positions below {d}")
        row_section, section = np.split(payload[_HEAD.size :], [row_bytes])
        rows = scratch("touched rows", np.uint32, touched)
        if row_codec == ALL:
            rows[:] = np.arange(touched)
        decode_part("rows", row_codec, row_section, row_count(d, width), rows)
        decode_part("rows", codec, section, elements_of(rows, width, d), out)
        if codec == ALL:
            whole_rows(rows, width, out)
        elif not join_rows(rows, out, width, out):
            raise ContainerError("rows: not every row has a position")
