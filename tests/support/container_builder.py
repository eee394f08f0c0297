"""Containers written by hand, from docs/container-format.md alone, so that every rule can be broken."""

import struct

import xxhash

TRANSFORM, NON_FINITE, ORDER, SHAPE = 0x80, 0x40, 0x20, 0x10


def varint(number):
    out = bytearray()
    while number > 127:
        out.append(number & 127 | 128)
        number >>= 7
    return bytes(out) + bytes([number])


def u32(*numbers):
    return struct.pack(f"<{len(numbers)}I", *numbers)


def f32(*numbers):
    return struct.pack(f"<{len(numbers)}f", *numbers)


def seal(body):
    """With a checksum that fits, so that the checks behind it are reached."""
    return body + u32(xxhash.xxh3_64_intdigest(body) & 0xFFFFFFFF)


def reseal(container):
    return seal(bytes(container)[:-4])


def number(value):
    """A varint, or bytes that stand in its place."""
    return value if isinstance(value, bytes) else varint(value)


def container(
    *,
    magic=0x47,
    version=0xE1,
    flags=0,
    index=1,
    value=1,
    d=8,
    transform=b"",
    shape=None,
    k=3,
    index_length=None,
    value_length=None,
    index_section=None,
    value_section=None,
    order_section=b"",
):
    """A valid container of 8 elements with 1.0, 2.0, 3.0 at 1, 4, 7 unless told otherwise. Any number may be bytes."""
    index_section = u32(1, 4, 7) if index_section is None else index_section
    value_section = f32(1, 2, 3) if value_section is None else value_section
    body = bytes([magic, version, flags, index, value]) + number(d) + transform
    if shape is not None:
        body += bytes([len(shape)]) + b"".join(map(number, shape))
    if not flags & NON_FINITE:
        if index:
            body += number(k) + number(len(index_section) if index_length is None else index_length)
        body += number(len(value_section) if value_length is None else value_length)
        body += (index_section if index else b"") + value_section + order_section
    return seal(body)
