"""Index codecs, one file each. A new one is its file and a line here."""

from . import auto, bitmap, bloom, elias_fano, huffman, raw, rice, rle, varint  # noqa: F401  (importing registers them)
from .base import IndexCodec

__all__ = ["IndexCodec"]
