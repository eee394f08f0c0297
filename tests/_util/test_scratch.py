"""Scratch arrays: each name and dtype has its own, and results are never among them."""

import numpy as np
from support.arrays import gauss, same_bits
from support.codec_conformance import specs

import grace_ext
from grace_ext._util import scratch
from grace_ext._util.rng import Stream


def test_scratch_arrays_do_not_leak_between_calls():
    """Encoded and decoded arrays may lie in scratch arrays; what compress and decompress return may not."""
    c = grace_ext.compressor("topk:0.1/rice/qsgd")
    blob = c.compress(gauss(5000))
    dense, kept = grace_ext.decompress(blob, 5000), blob.copy()
    expected = dense.copy()
    for text in specs():
        other = grace_ext.compressor(text)
        grace_ext.decompress(other.compress(gauss(6000, 2)), 6000)
        other.encode(gauss(7000, 3), Stream())
    assert same_bits(blob, kept) and same_bits(dense, expected)


def test_a_scratch_array_of_another_dtype_is_another_one():
    ints = scratch.scratch("a test's", np.uint32, 5)
    floats = scratch.scratch("a test's", np.float64, 5)
    assert ints.dtype == np.uint32 and floats.dtype == np.float64 and not np.shares_memory(ints, floats)
