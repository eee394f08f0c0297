"""Value codecs, one file each. A new one is its file and a line here."""

from . import (  # noqa: F401  (importing registers them)
    bfloat,
    deflate,
    dexp,
    half,
    lloyd,
    minmax,
    natural,
    onebit,
    polyfit,
    qsgd,
    raw,
    sketchml,
    terngrad,
    threelc,
)
from .base import ValueCodec

__all__ = ["ValueCodec"]
