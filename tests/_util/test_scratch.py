"""Scratch arrays: each name and dtype has its own, and results are never among them."""

import concurrent.futures

import numpy as np
import pytest
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


def test_each_thread_has_its_own():
    mine = scratch.scratch("of a thread", np.uint8, 10)
    mine[:] = 1
    with concurrent.futures.ThreadPoolExecutor(1) as threads:
        theirs = threads.submit(scratch.scratch, "of a thread", np.uint8, 10).result()
    assert not np.shares_memory(mine, theirs)


def test_an_array_is_used_again_and_grows():
    first = scratch.scratch("that grows", np.uint8, 10)
    assert np.shares_memory(scratch.scratch("that grows", np.uint8, 4), first)
    assert scratch.scratch("that grows", np.uint8, 11).size == 11


def test_arrays_of_someone_else_for_a_while():
    own, theirs = scratch.scratch("lent", np.uint8, 10), {}
    for _ in range(2):
        with pytest.raises(KeyError), scratch.use_scratch(theirs):
            other = scratch.scratch("lent", np.uint8, 10)
            raise KeyError
        assert not np.shares_memory(own, other) and np.shares_memory(next(iter(theirs.values())), other)
    assert np.shares_memory(scratch.scratch("lent", np.uint8, 10), own)
