"""Index codec `huffman`."""

import numpy as np

from ..errors import ConfigError, ContainerError
from ..kernels.byte_huffman import MOST_BYTES, STREAMS, byte_huffman_decode, byte_huffman_encode, byte_huffman_ends
from ..kernels.gap_huffman import CLASSES, CONTEXTS, gap_huffman_decode, gap_huffman_encode
from ..registry import register
from ._gaps import GapCounts
from .base import IndexCodec

_SCHEMES = ("gaps", "bytes")
_BYTES = 0  # the first byte of a section with scheme=bytes; with scheme=gaps it is the number of tables
_HEAD = 1 + 4 * (STREAMS - 1)


@register
class Huffman(IndexCodec):
    """Huffman codes of gap classes. Where real gradients cluster, they take half of the bound for random positions.

    The payload holds tables of code lengths and the codes (docs/container-format.md, "Gap classes" and "Bytes of
    positions").

    Args:
        scheme: `gaps` codes gap classes, with the code in the section. `bytes` codes the four bytes of each position with
            one code that both sides build from the bytes of 0 to d − 1; it is about three times as long, for study.

    Source:
        Huffman, A method for the construction of minimum-redundancy codes, 1952; scheme=bytes as in DeepReduce (Xu et al.,
        2021).
    """

    name, id = "huffman", 5
    slow = True

    def __init__(self, scheme: str = "gaps"):
        if scheme not in _SCHEMES:
            raise ConfigError(f"huffman: scheme={scheme}; allowed: {', '.join(_SCHEMES)}")
        self.scheme = scheme
        self._planned: GapCounts | None = None  # of the one support whose codes are planned already

    def encode(self, indices: np.ndarray, d: int) -> tuple[np.ndarray, np.ndarray]:
        if self.scheme == "bytes":
            return _encode_bytes(indices, d), indices
        planned = self._planned
        if planned is None or planned.indices is not indices:
            planned = GapCounts(indices, d)
        return _encode_gaps(planned), indices

    def size(self, indices: np.ndarray, d: int) -> int:
        if self.scheme == "bytes":
            ends = np.empty(STREAMS, np.int64)
            byte_huffman_ends(indices, d, ends)
            return _HEAD + int(ends[-1])
        return _size(GapCounts(indices, d))

    def size_from_gaps(self, gaps: GapCounts) -> int:
        return _size(gaps) if self.scheme == "gaps" else self.size(gaps.indices, gaps.d)

    def prepared(self, gaps: GapCounts) -> IndexCodec:
        planned = Huffman(self.scheme)
        planned._planned = gaps
        return planned

    @staticmethod
    def decode(payload: np.ndarray, d: int, out: np.ndarray) -> None:
        if payload.size and payload[0] == _BYTES:
            _decode_bytes(payload, d, out)
            return
        if payload.size < 3 or payload[0] not in (1, CONTEXTS) or not 1 <= payload[1] <= CLASSES:
            raise ContainerError("huffman: the scheme or the number of classes is missing or out of range")
        if not gap_huffman_decode(payload[2:], int(payload[0]), int(payload[1]), d, out):
            raise ContainerError(f"huffman: the section is not tables and codes of {out.size} positions below {d}")


def _size(gaps: GapCounts) -> int:
    """Return the bytes of the section."""
    return 2 + (gaps.plan[2] + 7) // 8


def _encode_gaps(gaps: GapCounts) -> np.ndarray:
    rows, classes, _ = gaps.plan
    size = _size(gaps)
    payload = np.empty(size + 8, np.uint8)
    payload[0], payload[1] = rows, classes
    gap_huffman_encode(gaps.indices, gaps.lengths, rows, classes, payload[2:])
    return payload[:size]


def _encode_bytes(indices: np.ndarray, d: int) -> np.ndarray:
    payload, ends = np.empty(_HEAD + MOST_BYTES * indices.size + 16, np.uint8), np.empty(STREAMS, np.int64)
    byte_huffman_encode(indices, d, payload[_HEAD:], ends)
    payload[0] = _BYTES
    payload[1:_HEAD].view("<u4")[:] = np.diff(ends[:-1], prepend=0)
    return payload[: _HEAD + ends[-1]]


def _decode_bytes(payload: np.ndarray, d: int, out: np.ndarray) -> None:
    if payload.size < _HEAD:
        raise ContainerError(f"huffman: {payload.size} bytes are too few for {STREAMS} streams")
    data = payload[_HEAD:]
    ends = np.append(np.cumsum(np.frombuffer(payload[1:_HEAD], "<u4"), dtype=np.int64), data.size)
    if ends[-2] > data.size or not byte_huffman_decode(data, d, ends, out):
        raise ContainerError(f"huffman: the streams are not the bytes of {out.size} positions below {d}")
