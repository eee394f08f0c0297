"""Everything is sent."""

from ..registry import register
from .base import Sparsifier


@register
class Dense(Sparsifier):
    name = "dense"

    def select(self, dense, scope):
        return None, dense
