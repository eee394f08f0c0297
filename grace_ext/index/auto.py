"""The default: whichever lossless codec is shortest for this support, or half a percent longer but much faster."""

from ..registry import lookup, names, register
from .base import IndexCodec
from .gaps import Gaps

_SLACK = 200  # a slow codec has to save more than this part of its size


@register
class Auto(IndexCodec):
    """Exact sizes from one pass over the gaps; containers carry the id of the shortest codec, never this one's."""

    name = "auto"

    def encode(self, indices, d):
        return self.choose(indices, d).encode(indices, d)

    def choose(self, indices, d):
        known = (lookup("index", name) for name in names("index"))
        candidates = [cls() for cls in known if cls.lossless and cls.universal and not cls.composite and cls.id is not None]
        gaps = Gaps(indices, d)
        chosen, least = None, None
        for bound, _, codec in sorted((codec.size_at_least(gaps), codec.id, codec) for codec in candidates):
            if chosen is None or bound < least:
                cost = _cost(codec, gaps)
                if chosen is None or cost < least:
                    chosen, least = codec, cost
        return chosen


def _cost(codec, gaps):
    size = codec.size_from(gaps)
    return size + size // _SLACK if codec.slow else size
