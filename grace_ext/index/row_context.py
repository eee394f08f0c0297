"""Index codec `row_context`."""

import math
from typing import NamedTuple

import numpy as np

from .._util.head import HeaderReader, varint
from .._util.scratch import scratch
from ..errors import ConfigError, ContainerError
from ..kernels.row_context import join_by_history, likely_width, split_by_history
from ..kernels.rows import join_rows, split_rows
from ..registry import by_id, register
from ._gaps import GapCounts
from ._parts import ALL, EMPTY, decode_part, elements_of, encode_part, row_count
from .base import IndexCodec
from .raw import RawIndex

MOST_WIDTH = 1 << 16
MOST_HISTORY = 6
_SPARSE = 64  # most elements of the touched rows for each position
_FIRST = ("the bits of history", "the width", "the number of rows", "the codec of the rows", "the bytes of the rows")
_MOST_HEAD = 5 * (len(_FIRST) + (4 << MOST_HISTORY))  # bytes
_FEWEST, _FEW = 1024, 4096  # with fewer positions, no width is looked for; or only where they cluster
_CLUSTERED = 0.75  # the most of the bits of random positions that gap classes take where positions cluster
_WINDOWS, _WINDOW, _LONG_WINDOW = 6, 512, 4096  # of positions, by which a width is chosen
#: Widths that are looked for: usual ones of embeddings and layers.
_WIDTHS = np.array(
    [16, 32, 48, 50, 64, 96, 100, 128, 160, 192, 200, 256, 300, 320, 384, 400, 512, 576, 640, 768]
    + [800, 1000, 1024, 1152, 1280, 1536, 2048, 2304, 2560, 3072, 4096],
    np.uint32,
)


class _Plan(NamedTuple):
    """A support, split: numbers of bits of history, width, touched rows, and the positions of each class."""

    history: int
    width: int
    rows: np.ndarray
    positions: list[np.ndarray]
    domains: list[int]


@register
class RowContext(IndexCodec):
    """Positions of a table, each predicted from what the touched rows above hold in the same column.

    In the gradients of embeddings and output layers, columns repeat from row to row. The elements of the touched rows are
    sorted into classes by which of the last touched rows have their column in the support; each class has a section of its
    own, by the codec that `auto` would choose for it. The last rows are 1 to 6, by the number of positions.

    The payload holds the width, the touched rows and the classes (docs/container-format.md, "Row contexts"). Where no width
    stands out, or the touched rows are nearly empty, it holds the positions as they are.

    Args:
        width: Number of elements of a row, 1 to 65536; 0: of some usual widths, the one with which columns repeat most.

    Source:
        Rissanen and Langdon, Universal modeling and coding, IEEE Trans. Information Theory 1981: contexts from the rows above,
        for images of two colors.
    """

    name, id = "row_context", 12
    composite = competes = slow = True

    def __init__(self, width: int = 0):
        if not 0 <= width <= MOST_WIDTH:
            raise ConfigError(f"row_context: width={width}; allowed: 0 (the one that stands out), or 1 to {MOST_WIDTH}")
        self.width = width
        self._encoded: GapCounts | None = None  # the one support that is encoded already

    def encode(self, indices: np.ndarray, d: int) -> tuple[np.ndarray, np.ndarray]:
        if self._encoded is not None and self._encoded.indices is indices and self._encoded.payload is not None:
            return self._encoded.payload, indices
        plan = self._plan(indices, d)
        if plan is None:
            return np.concatenate([np.zeros(1, np.uint8), RawIndex().encode(indices, d)[0]]), indices
        return _section(plan, d), indices

    def size_from_gaps(self, gaps: GapCounts) -> int:
        plan = self._plan(gaps.indices, gaps.d, gaps)
        if plan is None:
            return 1 + 4 * gaps.indices.size
        gaps.payload = _section(plan, gaps.d)
        return gaps.payload.size

    def prepared(self, gaps: GapCounts) -> IndexCodec:
        encoded = RowContext(self.width)
        encoded._encoded = gaps
        return encoded

    def _plan(self, indices: np.ndarray, d: int, gaps: GapCounts | None = None) -> _Plan | None:
        """Split the support; None where that cannot pay. The arrays are scratch arrays. gaps: of the support, if they are known."""
        k = indices.size
        width = self.width or _width_of(indices, d, gaps)
        if not width:
            return None
        rows, compact = (scratch(name, np.uint32, k) for name in ("context rows", "context compact"))
        rows = rows[: split_rows(indices, width, rows, compact)]
        domain = elements_of(rows, width, d)
        if domain > _SPARSE * k:
            return None
        history = min(_most_history(width), max(1, (k.bit_length() - 9) // 2))
        counts, domains = (np.empty(1 << history, np.int64) for _ in range(2))
        out = scratch("context positions", np.uint32, k)
        bitmap = scratch("context bitmap", np.uint64, (domain + history * width) // 64 + 2)
        split_by_history(compact, width, domain, history, bitmap, out, counts, domains)
        return _Plan(history, width, rows, np.split(out, np.cumsum(counts)[:-1]), domains.tolist())

    @staticmethod
    def decode(payload: np.ndarray, d: int, out: np.ndarray) -> None:
        if payload.size and payload[0] == 0:
            RawIndex.decode(payload[1:], d, out)
            return
        k, read = out.size, HeaderReader(payload[:_MOST_HEAD].tobytes())
        history, width, touched, row_codec, row_bytes = (read.varint(f"row_context: {what}") for what in _FIRST)
        if not 1 <= width <= MOST_WIDTH or not 1 <= history <= _most_history(width):
            raise ContainerError("row_context: the bits of history or the width are out of range")
        if not 1 <= touched <= min(k, row_count(d, width)):
            raise ContainerError(f"row_context: {touched} rows of {width} are not those of {k} positions below {d}")
        classes = [tuple(read.varint("row_context: a number of a class") for _ in range(4)) for _ in range(1 << history)]
        counts, domains = (np.array([entry[j] for entry in classes], np.int64) for j in (1, 2))
        rows = scratch("context rows", np.uint32, touched)
        if row_codec == ALL:
            rows[:] = np.arange(touched)
        section, end = _cut(payload, read.at, row_bytes)
        decode_part("row_context", row_codec, section, row_count(d, width), rows)
        domain = elements_of(rows, width, d)
        if counts.sum() != k or domains.sum() != domain or domain > _SPARSE * k:
            raise ContainerError(f"row_context: the classes are not those of {k} positions in {touched} rows")
        positions, at = scratch("context positions", np.uint32, k), 0
        for codec, count, elements, size in classes:
            part, (section, end) = positions[at : at + count], _cut(payload, end, size)
            if codec == ALL and not section.size and count in (0, elements):
                part[:] = np.arange(count)
            elif codec == ALL or by_id("index", codec) is None or not count:
                raise ContainerError(f"row_context: {count} of {elements} positions cannot be coded by {codec}")
            else:
                decode_part("row_context", codec, section, elements, part)
            at += count
        bitmap = scratch("context bitmap", np.uint64, (domain + history * width) // 64 + 3)
        bitmaps = scratch("context bitmaps", np.uint64, domain // 64 + 2 * counts.size)
        sizes = counts, domains
        if end != payload.size or not join_by_history(positions, width, domain, history, *sizes, bitmap, bitmaps, out):
            raise ContainerError("row_context: the classes do not have the elements that they should have")
        if not join_rows(rows, out, width, out):
            raise ContainerError("row_context: not every row has a position")


def _most_history(width: int) -> int:
    """Return the most bits of history: at most four classes for each element of a row, since decoding visits all in each row."""
    return min(MOST_HISTORY, (4 * width).bit_length() - 1)


def _width_of(indices: np.ndarray, d: int, gaps: GapCounts | None) -> int:
    """Return the width that stands out; 0 if none does."""
    k = indices.size
    if k < _FEWEST:
        return 0
    if k < _FEW:
        random = k * (math.log2(d / k) + 1 / math.log(2))  # about log2 C(d, k)
        if (gaps or GapCounts(indices, d)).plan[2] > _CLUSTERED * random:
            return 0
    return likely_width(indices, _WIDTHS, _WINDOWS, *(min(size, k // (2 * _WINDOWS)) for size in (_WINDOW, _LONG_WINDOW)))


def _section(plan: _Plan, d: int) -> np.ndarray:
    """Encode the parts of a plan."""
    parts = [encode_part(plan.rows, row_count(d, plan.width))]
    for part, domain in zip(plan.positions, plan.domains, strict=True):
        parts.append(encode_part(part, domain) if part.size else (ALL, EMPTY))
    head = _head(plan, [id for id, _ in parts], [section.size for _, section in parts])
    return np.concatenate([np.frombuffer(head, np.uint8), *(section for _, section in parts)])


def _head(plan: _Plan, ids: list[int], sizes: list[int]) -> bytes:
    """Return the head of the payload."""
    numbers = [plan.history, plan.width, plan.rows.size, ids[0], sizes[0]]
    for part, domain, id, size in zip(plan.positions, plan.domains, ids[1:], sizes[1:], strict=True):
        numbers += [id, part.size, domain, size]
    return b"".join(map(varint, numbers))


def _cut(payload: np.ndarray, at: int, count: int) -> tuple[np.ndarray, int]:
    """Return `count` bytes of uint8[m] from `at` on, and where they end. Raises ContainerError where there are fewer."""
    if count > payload.size - at:
        raise ContainerError(f"row_context: the payload ends before a section of {count} bytes")
    return payload[at : at + count], at + count
