"""A second, slow decoder, written from docs/container-format.md alone. If it and grace_ext differ, one of them is wrong."""

import importlib
import math
import pkgutil
import struct
import zlib

import numpy as np
import xxhash

from support import reference_kernels
from support.reference_decoder import levels as levels_decoder

DTYPES = ("float32", "float16", "bfloat16", "float64")


class Reader:
    def __init__(self, data):
        self.data, self.at = bytes(data), 0

    def take(self, count):
        self.at += count
        return self.data[self.at - count : self.at]

    def byte(self):
        return self.take(1)[0]

    def varint(self):
        number = shift = 0
        while True:
            byte = self.byte()
            number += (byte & 127) << shift
            shift += 7
            if byte < 128:
                return number


def decode(container):
    """A valid container -> (dense list of d floats, fields)."""
    read = Reader(container)
    assert (read.byte(), read.byte()) == (0x47, 0xE1)
    flags, index_id, value_id, d = read.byte(), read.byte(), read.byte(), read.varint()
    transform = (read.byte(), read.take(read.varint())) if flags & 0x80 else None
    shape = [read.varint() for _ in range(read.byte())] if flags & 0x10 else None
    fields = {"d": d, "shape": shape, "dtype": DTYPES[flags & 15], "index": index_id, "value": value_id}
    assert shape is None or math.prod(shape) == d
    if flags & 0x40:
        assert not flags & 0xA0 and index_id == value_id == 0
        support, values = range(d), [math.nan] * d
    else:
        domain = TRANSFORM[transform[0]][0](transform[1], d) if transform else d
        k, index_length = (read.varint(), read.varint()) if index_id else (domain, 0)
        value_length = read.varint()
        index_section, value_section = read.take(index_length), read.take(value_length)
        support = INDEX[index_id](index_section, domain, k) if index_id and k else range(k)
        values = VALUE[value_id](value_section, k) if k else []
        if flags & 0x20:
            width = (k - 1).bit_length() if k else 0
            order = reference_kernels.unpack(read.take((k * width + 7) // 8), width, k)
            values = [value for _, value in sorted(zip(order, values, strict=True))]
        fields["k"] = k
    assert read.at == len(read.data) - 4
    assert struct.unpack("<I", read.data[-4:])[0] == xxhash.xxh3_64_intdigest(read.data[:-4]) & 0xFFFFFFFF
    dense = [0.0] * (d if flags & 0x40 else domain)
    for position, value in zip(support, values, strict=True):
        dense[position] = value
    if transform:
        dense = TRANSFORM[transform[0]][1](transform[1], np.array(dense, np.float32))[:d].tolist()
    return dense, fields


def raw_index(section, d, k):
    return struct.unpack(f"<{k}I", section)


def bitmap(section, d, k):
    return [i for i in range(d) if section[i >> 3] >> (i & 7) & 1]


def rice(section, d, k):
    e = section[0]
    split = 1 + math.ceil(k * e / 8)
    return reference_kernels.unrice(section[1:split], section[split:], k, e)


def raw_values(section, k):
    return struct.unpack(f"<{k}f", section)


def fp16(section, k):
    return struct.unpack(f"<{k}e", section)


def qsgd(section, k):
    bits, bucket, flags = section[0], 1 << (section[1] & 15), section[1] & 0x70
    at = 2 + (flags & 0x40 > 0) * (1 if bits <= 8 else 2)
    s = int.from_bytes(section[2:at], "little") if flags & 0x40 else 2 ** (bits - 1) - 1
    count = math.ceil(k / bucket)
    norms = struct.unpack_from(f"<{count}f", section, at)
    rest = section[at + 4 * count :]
    codes = levels_decoder.levels(rest, 2 * s + 1, k) if flags & 0x20 else reference_kernels.unpack(rest, bits, k)
    return reference_kernels.unqsgd(codes, s, bucket, norms).tolist()


def deflate(section, k):
    return raw_values(zlib.decompress(section, wbits=-15), k)


# id -> decoder, for transforms (domain, inverse). The other modules of this folder have more of them, under the same names.
INDEX = {1: raw_index, 2: bitmap, 3: rice, 13: raw_index}  # 13: in the order of the values
VALUE = {1: raw_values, 2: fp16, 3: qsgd, 4: deflate}
TRANSFORM = {}
for found in pkgutil.iter_modules(__path__):
    more = importlib.import_module(f"{__name__}.{found.name}")
    INDEX.update(getattr(more, "INDEX", {}))
    VALUE.update(getattr(more, "VALUE", {}))
    TRANSFORM.update(getattr(more, "TRANSFORM", {}))
