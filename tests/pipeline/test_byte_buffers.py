"""Buffers of bytes, and the numbers in the head of a container."""

import numpy as np
import pytest

from grace_ext import ContainerError
from grace_ext.pipeline.byte_buffers import HeaderReader, as_bytes, varint

NUMBERS = [0, 1, 127, 128, 300, 2**14 - 1, 2**14, 2**21, 2**28 - 1, 2**28, 2**32 - 1]


@pytest.mark.parametrize("number", NUMBERS)
def test_a_varint_comes_back_and_is_as_short_as_can_be(number):
    code = varint(number)
    read = HeaderReader(code + b"rest")
    assert read.varint("a number") == number and read.at == len(code)
    assert len(code) == max(1, -(-number.bit_length() // 7))
    assert all(byte >= 128 for byte in code[:-1]) and code[-1] < 128


@pytest.mark.parametrize("number", NUMBERS)
def test_a_varint_that_ends_too_early_names_what_is_missing(number):
    with pytest.raises(ContainerError, match="the buffer ends before the length"):
        HeaderReader(varint(number)[:-1]).varint("the length")


@pytest.mark.parametrize("code", [b"\x80\x00", b"\xff\xff\xff\xff\x1f", b"\x80\x80\x80\x80\x80\x01", b"\x81\x80\x00"])
def test_a_varint_is_in_its_shortest_form_and_below_2_to_32(code):
    with pytest.raises(ContainerError, match="d is not a varint below 2\\*\\*32 in its shortest form"):
        HeaderReader(code).varint("d")


def test_bytes_are_read_one_by_one():
    read = HeaderReader(b"ab")
    assert (read.byte("first"), read.byte("second")) == (97, 98)
    with pytest.raises(ContainerError, match="the buffer ends before the third"):
        read.byte("the third")


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
