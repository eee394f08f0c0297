"""The former import path of grace_ext.pipeline.container, which stays valid."""

from .pipeline.container import DTYPES, MAX_ELEMENTS, Container, checksum, pack, parse, split

__all__ = ["DTYPES", "MAX_ELEMENTS", "Container", "checksum", "pack", "parse", "split"]
