"""Malformed index, value and order sections: each way has its own message, and its own test here."""

import math
import zlib

import numpy as np
import pytest
from support import container_builder
from support.codec_conformance import refused
from support.container_builder import ORDER, f32, u32

import grace_ext
from grace_ext.pipeline import container


@pytest.mark.parametrize("indices", [(1, 4, 8), (1, 4, 2**32 - 1), (4, 1, 7), (1, 1, 7), (7, 4, 1)])
def test_raw_indices_not_ascending_below_d(indices):
    refused("the positions are not ascending below d", container_builder.container(index_section=u32(*indices)))


def test_raw_sections_of_another_length():
    refused("raw index section: 8 bytes for 3", container_builder.container(index_section=u32(1, 4)))
    refused("raw value section: 8 bytes for 3", container_builder.container(value_section=f32(1, 2)))


@pytest.mark.parametrize("keys", [(4, 8, 1), (1, 2**32 - 1, 4), (2**31, 1, 4), (4, 1, 4), (7, 7, 7)])
def test_keys_twice_or_beyond_d(keys):
    accepted = container_builder.container(index=13, index_section=u32(7, 1, 4))
    assert grace_ext.decompress(accepted, 8).tolist() == [0, 2, 0, 0, 3, 0, 0, 1]
    refused(
        "keys: the positions are not distinct and below d", container_builder.container(index=13, index_section=u32(*keys))
    )


def test_keys_of_another_length_or_with_an_order_section():
    refused("keys: 8 bytes for 3", container_builder.container(index=13, index_section=u32(1, 4)))
    refused(
        "'keys' has the order of the values, and there is an order section",
        container_builder.container(index=13, flags=ORDER, index_section=u32(7, 1, 4), order_section=bytes([0b100001])),
    )


@pytest.mark.parametrize("bits, k", [(0b1011, 2), (0b1011, 4), (0, 3)])
def test_bitmap_with_another_count(bits, k):
    refused(
        f"not {k} bits set",
        container_builder.container(index=2, k=k, index_section=bytes([bits]), value_section=f32(*[1] * k)),
    )


def test_bitmap_of_another_length_or_beyond_d():
    refused("bitmap: 2 bytes for 8", container_builder.container(index=2, index_section=b"\x0b\0"))
    refused("not 3 bits set below 7", container_builder.container(index=2, d=7, index_section=b"\x83"), size=7)


def rice(section, d=8, k=3):
    return container_builder.container(index=3, d=d, k=k, index_section=section, value_section=f32(*[1] * k))


def test_rice():
    """Gaps 1, 2, 2 with e = 1: remainders 1, 0, 0; quotients 0, 1, 1."""
    assert np.flatnonzero(grace_ext.decompress(rice(bytes([1, 0b001, 0b10101])), 8)).tolist() == [1, 4, 7]
    assert np.flatnonzero(grace_ext.decompress(rice(bytes([0, 0b10010010])), 8)).tolist() == [1, 4, 7]
    refused("the parameter is missing", rice(b""))
    refused("out of range", rice(bytes([31, 0, 0])))
    refused("cannot be 3 codes", rice(bytes([1, 0b001])))
    refused("cannot be 3 codes", rice(bytes([1, 0b001, 0b10101, 0, 0])))
    refused("not 3 positions below 8", rice(bytes([0, 0b10010010, 0])))  # a byte too much
    refused("not 3 positions below 8", rice(bytes([1, 0b1001, 0b10101])))  # an unused bit of the first stream
    refused("not 3 positions below 8", rice(bytes([1, 0b001, 0b110101])))  # a one behind the last code
    refused("not 3 positions below 8", rice(bytes([1, 0b001, 0b00101])))  # too few
    refused("not 3 positions below 8", rice(bytes([1, 0b101, 0b10101])))  # the last is 8


@pytest.mark.parametrize(
    "head", ["", "08", "0103", "0402", "0410", "0483", "0443", "044307", "044303", "084380", "014300", "1103"]
)
def test_qsgd_parameters(head):
    """Also: a reserved bit, levels that are missing, those that bits says, of another width, too many, none."""
    for section in (bytes.fromhex(head), bytes.fromhex(head) + bytes(20)):
        refused("the parameters are missing or out of range", container_builder.container(value=3, value_section=section))


def test_qsgd():
    def blob(norm, codes=b"\x01", head=b"\x02\x03"):
        return container_builder.container(value=3, value_section=head + f32(norm) + codes)

    assert grace_ext.decompress(blob(3, b"\x24"), 8).tolist() == [0, -3, 0, 0, 0, 0, 0, 3]
    refused("a norm is negative", blob(-1))
    for norm in (math.nan, math.inf):
        refused("a scale is not finite", blob(norm))
    refused("do not fit 3 values of 2 bits", blob(1, b"\x01\0"))
    refused("do not fit 3 values of 3 bits", blob(1, head=b"\x03\x03"))
    refused("a code is out of range", blob(1, b"\x03"))
    refused("a code is out of range", blob(1, b"\x40"))  # unused bits
    assert grace_ext.decompress(blob(4, b"\x44\x00", b"\x03\x43\x02"), 8).tolist() == [0, 4, 0, 0, -4, 0, 0, -2]
    refused("a code is out of range", blob(4, b"\x05\0", b"\x03\x43\x02"))
    wide = (0x1FE | 0xFF << 9).to_bytes(4, "little")  # of 9 bits: 510, 255, 0; 255 levels need no count
    assert grace_ext.decompress(blob(2, wide, b"\x09\x03"), 8).tolist() == [0, 2, 0, 0, 0, 0, 0, -2]
    refused("a code is out of range", blob(2, b"\xff\xff\xff\x07", b"\x09\x03"))
    refused("a code is out of range", blob(2, b"\0\0\0\x08", b"\x09\x03"))  # unused bits
    for head in (b"\x09\x43\xff\0", b"\x09\x43\x7f\0", b"\x09\x23", b"\x11\x03", b"\x10\x43\0\x80"):
        refused("the parameters are missing or out of range", blob(2, wide, head))
    assert grace_ext.decompress(blob(4, b"\x03\x03", b"\x03\x63\x02"), 8).tolist() == [0, 2, 0, 0, 2, 0, 0, 2]
    refused("do not fit", blob(4, b"", b"\x03\x63\x02"))
    refused("the constant is missing or out of range", blob(4, b"\x03\x05", b"\x03\x63\x02"))


def test_fp16_of_another_length():
    refused("fp16 section: 7 bytes for 3", container_builder.container(value=2, value_section=b"1234567"))


def test_deflate():
    def stream(data, tail=b""):
        packer = zlib.compressobj(6, 8, -15)
        return container_builder.container(value=4, value_section=packer.compress(data) + packer.flush() + tail)

    assert grace_ext.decompress(stream(f32(1, 2, 3)), 8)[[1, 4, 7]].tolist() == [1, 2, 3]
    for bad in (
        stream(f32(1, 2)),
        stream(f32(1, 2, 3) + b"\0"),
        stream(bytes(100_000_000)),
        stream(f32(1, 2, 3), b"x"),
        container_builder.container(value=4, value_section=b""),
        container_builder.container(
            value=4, value_section=container.parse(stream(f32(1, 2, 3))).value_section.tobytes()[:-1]
        ),
    ):
        refused("the stream does not hold exactly 3 values", bad)
    refused("deflate: Error", container_builder.container(value=4, value_section=b"\xff\xff\xff"))


def test_an_empty_support_with_a_section():
    refused("an empty support has a section", container_builder.container(k=0, value_section=b""))
    refused("an empty support has a section", container_builder.container(k=0, index_section=b""))
    refused("an empty support has a section", container_builder.container(index=0, d=0), size=0)


@pytest.mark.parametrize("order", [0b000000, 0b110000 | 0b0101, 0b11 << 2 | 1])
def test_order_not_a_permutation(order):
    """(0, 0, 0); (1, 1, 3); (1, 3, 0): twice the same, or beyond k."""
    refused("the order section is not a permutation", container_builder.container(flags=ORDER, order_section=bytes([order])))


@pytest.mark.parametrize("unused", [0x40, 0x80, 0xC0])
def test_order_with_unused_bits(unused):
    refused("unused bits", container_builder.container(flags=ORDER, order_section=bytes([0b100001 | unused])))
