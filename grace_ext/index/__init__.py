"""Index codecs, one file each. A new one is its file and a line here."""

from . import (  # noqa: F401  (importing registers them)
    auto,
    bitmap,
    bloom,
    elias_fano,
    huffman,
    raw,
    rice,
    rice_adaptive,
    rle,
    rows,
    shared,
    varint,
)
from .base import IndexCodec

__all__ = ["IndexCodec"]
