"""Index codec `auto`, the default: the best codec for each support."""

import functools
from typing import Any

import numpy as np

from ..registry import classes, register
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
        return shortest(indices, d, composite=True)


def shortest(indices: np.ndarray, d: int, composite: bool = False) -> IndexCodec:
    """Choose a codec as `auto` does.

    Args:
        indices: uint32[k], strictly ascending, below d, k >= 1.
        d: Number of elements of the domain.
        composite: Whether a codec may be chosen whose section consists of other codecs' sections.

    Returns:
        The codec.
    """
    gaps = GapCounts(indices, d)
    chosen: Any = None
    least = 0  # bytes of the chosen one
    for codec in _candidates(classes("index"), composite):
        if chosen is None or codec.size_lower_bound(gaps) < least:
            cost = codec.size_from_gaps(gaps)
            if codec.slow:
                cost += cost // _SLACK
            if chosen is None or cost < least:
                chosen, least = codec, cost
    return chosen.prepared(gaps)


@functools.lru_cache(maxsize=8)  # where codecs are registered later, it is asked for others
def _candidates(known: tuple[type[IndexCodec], ...], composite: bool) -> list[IndexCodec]:
    """Return a codec of each class that competes."""
    fits = (cls for cls in known if cls.lossless and cls.universal and cls.id is not None)
    codecs = (cls() for cls in fits if not cls.composite or composite and cls.competes)
    # Those with a lower bound come last, when there is a size to compare it with.
    return sorted(codecs, key=lambda codec: (type(codec).size_lower_bound is not IndexCodec.size_lower_bound, codec.id))
