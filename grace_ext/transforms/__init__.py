"""Transforms, one file each. A new one takes a file and a line here."""

from . import dct  # noqa: F401  (importing registers it)
from .base import Transform

__all__ = ["Transform"]
