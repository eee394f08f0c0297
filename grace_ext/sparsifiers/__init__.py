"""Sparsifiers, one file each. A new one takes a file and a line here."""

from . import adaq, dense, dgc, nonzero, randomk, threshold, topk  # noqa: F401  (importing registers them)
from .base import Scope, Sparsifier

__all__ = ["Scope", "Sparsifier"]
