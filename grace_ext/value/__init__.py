"""Value codecs, one file each. A new one takes a file and a line here."""

from . import (  # noqa: F401  (importing registers them)
    bfloat,
    deflate,
    dexp,
    half,
    inceptionn,
    lloyd,
    minmax,
    natural,
    onebit,
    polyfit,
    qsgd,
    raw,
    sign,
    sketchml,
    terngrad,
    threelc,
)
from .base import ValueCodec

__all__ = ["ValueCodec"]
