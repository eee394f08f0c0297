"""The section that a value codec writes, and what it decodes to."""

import numpy as np

from grace_ext.pipeline import spec
from support import codec_conformance

FLT_MAX = np.finfo(np.float32).max


def encoded(text, values):
    """(section, what it decodes to)."""
    codec = spec.parse_stage("value", text)
    section = codec.encode(np.asarray(values, np.float32), codec_conformance.STREAM)[0].copy()
    return section, decoded(codec, section, len(values))


def decoded(codec, section, k):
    out = np.full(k, np.nan, np.float32)
    codec.decode(section, out)
    return out
