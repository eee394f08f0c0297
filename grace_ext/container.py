"""The import path that grace_ext.pipeline.container had at first. It stays."""

from .pipeline.container import DTYPES, MAX_ELEMENTS, Container, checksum, pack, parse, split

__all__ = ["DTYPES", "MAX_ELEMENTS", "Container", "checksum", "pack", "parse", "split"]
