"""The numbers in the head of a container, and of sections."""

import pytest

from grace_ext import ContainerError
from grace_ext._util.head import HeaderReader, varint

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
