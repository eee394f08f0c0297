"""The default: whichever lossless codec is shortest for this support."""

from ..registry import lookup, names, register
from .base import IndexCodec
from .gaps import Gaps


@register
class Auto(IndexCodec):
    """Exact sizes from one pass over the gaps; containers carry the id of the shortest codec, never this one's."""

    name = "auto"

    def encode(self, indices, d):
        return self.choose(indices, d).encode(indices, d)

    def choose(self, indices, d):
        known = (lookup("index", name) for name in names("index"))
        candidates = [cls() for cls in known if cls.lossless and cls.universal and cls.id is not None]
        gaps = Gaps(indices, d)
        chosen, size = None, None
        for bound, _, codec in sorted((codec.size_at_least(gaps), codec.id, codec) for codec in candidates):
            if chosen is None or bound < size:
                found = codec.size_from(gaps)
                if chosen is None or found < size:
                    chosen, size = codec, found
        return chosen
