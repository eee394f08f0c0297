"""Index codec `auto`, the default: the best codec for each support."""

from typing import Any

import numpy as np

from ..registry import lookup, names, register
from ._gaps import GapCounts
from .base import IndexCodec

_SLACK = 200  # a slow codec has to save more than 1 / 200 of its size


@register
class Auto(IndexCodec):
    """Chooses the lossless codec that encodes a support in the fewest bytes.

    Sizes are exact. Codecs whose lower bound is not below the best size so far are not measured. A codec that is several
    times as slow as others is chosen only if it saves more than half a percent. Containers carry the id of the chosen codec.
    """

    name = "auto"

    def encode(self, indices: np.ndarray, d: int) -> tuple[np.ndarray, np.ndarray]:
        return self.choose(indices, d).encode(indices, d)

    def choose(self, indices: np.ndarray, d: int) -> IndexCodec:
        known = (lookup("index", name) for name in names("index"))
        candidates = [cls() for cls in known if cls.lossless and cls.universal and not cls.composite and cls.id is not None]
        gaps = GapCounts(indices, d)
        chosen: Any = None
        least = 0  # bytes of the chosen one
        for bound, _, codec in sorted((codec.size_lower_bound(gaps), codec.id, codec) for codec in candidates):
            if chosen is None or bound < least:
                cost = _cost(codec, gaps)
                if chosen is None or cost < least:
                    chosen, least = codec, cost
        return chosen


def _cost(codec: IndexCodec, gaps: GapCounts) -> int:
    size = codec.size_from_gaps(gaps)
    return size + size // _SLACK if codec.slow else size
