"""Value codecs, one file each. A new one takes a file and a line here."""

from . import bfloat, deflate, dexp, half, lloyd, minmax, natural, onebit, polyfit, qsgd, raw, sketchml, terngrad, threelc  # noqa: F401  (importing registers them)
from .base import ValueCodec

__all__ = ["ValueCodec"]
