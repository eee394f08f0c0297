"""The default: whichever lossless codec is shortest for this support."""

from ..registry import lookup, names, register
from .base import IndexCodec


@register
class Auto(IndexCodec):
    """Asks every lossless codec for its exact size; containers carry the id of the shortest, never this one's."""

    name = "auto"

    def encode(self, indices, d):
        return self.choose(indices, d).encode(indices, d)

    def choose(self, indices, d):
        known = (lookup("index", name) for name in names("index"))
        candidates = [cls() for cls in known if cls.lossless and cls.id is not None]
        return min(candidates, key=lambda codec: codec.size(indices, d))
