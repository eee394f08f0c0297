"""Selecting from a gradient as a compressor does."""

from grace_ext._util.rng import Stream
from grace_ext.pipeline.spec import parse_stage
from grace_ext.sparsifiers import Scope
from support.arrays import same_bits


def select(text, dense, stream=None, sizes=None):
    scope = Scope(stream or Stream(), sizes or (dense.size,))
    indices, values = parse_stage("sparsifier", text).select(dense, scope)
    assert same_bits(values, dense[indices])
    return indices.copy()
