"""Index codecs, one file each. A new one takes a file and a line here."""

from . import (  # noqa: F401  (importing registers them)
    auto,
    bitmap,
    bloom,
    elias_fano,
    huffman,
    keys,
    raw,
    rice,
    rice_adaptive,
    rle,
    row_context,
    rows,
    shared,
    varint,
)
from .base import IndexCodec

__all__ = ["IndexCodec"]
