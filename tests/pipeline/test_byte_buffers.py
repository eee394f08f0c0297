"""Buffers of bytes."""

import numpy as np
import pytest

from grace_ext import ContainerError
from grace_ext.pipeline.byte_buffers import as_bytes


@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview])
def test_buffers_are_viewed_and_not_copied(kind):
    data = kind(b"abc")
    found = as_bytes(data)
    assert found.dtype == np.uint8 and found.tobytes() == b"abc"
    assert np.shares_memory(found, np.frombuffer(data, np.uint8))


def test_arrays_are_viewed_where_they_are_contiguous():
    array = np.arange(10, dtype=np.uint8)
    assert np.shares_memory(as_bytes(array), array)
    assert as_bytes(array[::2]).flags.c_contiguous and as_bytes(array[::2]).tolist() == [0, 2, 4, 6, 8]


@pytest.mark.parametrize("wrong", [np.zeros(3, np.int8), np.zeros((2, 2), np.uint8), "text", 5, None, [1, 2]])
def test_what_is_no_buffer_of_bytes(wrong):
    with pytest.raises(ContainerError, match="a container is"):
        as_bytes(wrong)
