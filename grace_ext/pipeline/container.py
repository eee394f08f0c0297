"""The wire format. docs/container-format.md is its specification."""

import dataclasses
import math
import struct

import numpy as np
import xxhash

from .. import registry
from ..errors import ConfigError, ContainerError
from ..kernels import pack_bits, unpack_bits

MAGIC, VERSION = 0x47, 1
MAX_ELEMENTS = 2**31 - 1
DTYPES = ("float32", "float16", "bfloat16", "float64")
_TRANSFORM, _NON_FINITE, _ORDER, _SHAPE = 0x80, 0x40, 0x20, 0x10
_MAX_NDIM, _MAX_PARAMETERS = 32, 16
_MAX_HEADER = 5 + 5 + 2 + _MAX_PARAMETERS + 1 + 5 * _MAX_NDIM + 3 * 5


@dataclasses.dataclass(frozen=True)
class Container:
    """A parsed container. The sections are views of the buffer it was parsed from.

    d: elements of the gradient; domain: of what is encoded, which is more than d if a transform has padded it.
    """

    d: int
    domain: int
    k: int
    index_id: int
    value_id: int
    index_section: np.ndarray
    value_section: np.ndarray
    order_section: np.ndarray | None
    dtype: str
    shape: tuple[int, ...] | None
    transform: tuple[int, bytes] | None
    non_finite: bool
    nbytes: int

    def order(self) -> np.ndarray | None:
        """uint32[k]: for each decoded value its place in the support; None when values are in ascending order."""
        if self.order_section is None:
            return None
        width = order_width(self.k)
        unused = -self.k * width % 8
        if unused and int(self.order_section[-1]) >> 8 - unused:
            raise ContainerError("the order section has unused bits that are not 0")
        order = np.empty(self.k, np.uint32)
        unpack_bits(self.order_section, width, order)
        seen = np.zeros(self.k, bool)
        if self.k and order.max() < self.k:
            seen[order] = True
        if not seen.all():
            raise ContainerError("the order section is not a permutation")
        return order


def order_width(k: int) -> int:
    """Bits of one entry of the order section."""
    return (k - 1).bit_length() if k > 0 else 0


def check_elements(d: int) -> None:
    if d > MAX_ELEMENTS:
        raise ConfigError(f"a tensor of {d} elements is too large for one container ({MAX_ELEMENTS} at most): split it")


def _varint(number: int) -> bytes:
    out = bytearray()
    while number > 127:
        out.append(number & 127 | 128)
        number >>= 7
    out.append(number)
    return bytes(out)


def pack(d, k, index_id, index_section, value_id, value_section, *, order=None, dtype="float32", shape=None, transform=None):
    """Assemble a container. index_id 0 means dense: all elements and no index section. transform: its id and parameters.

    Returns uint8[m].
    """
    check_elements(d)
    flags = (_ORDER if order is not None else 0) | (_SHAPE if shape is not None else 0)
    flags |= _TRANSFORM if transform is not None else 0
    head = bytearray((MAGIC, 0xE0 | VERSION, flags | DTYPES.index(dtype), index_id, value_id))
    head += _varint(d)
    if transform is not None:
        head += bytes((transform[0], len(transform[1]))) + transform[1]
    if shape is not None:
        if len(shape) > _MAX_NDIM or math.prod(shape) != d:
            raise ConfigError(f"shape {shape} does not fit {d} elements in at most {_MAX_NDIM} dimensions")
        head.append(len(shape))
        for size in shape:
            head += _varint(size)
    parts = [value_section]
    if index_id:
        head += _varint(k) + _varint(index_section.size)
        parts.insert(0, index_section)
    head += _varint(value_section.size)
    if order is not None:
        packed = np.zeros((k * order_width(k) + 7) // 8, np.uint8)
        pack_bits(order, order_width(k), packed)
        parts.append(packed)
    return _seal(head, parts)


def pack_non_finite(d: int, dtype: str = "float32") -> np.ndarray:
    """The container of a gradient with a NaN or an Inf in it: uint8[m], no sections."""
    check_elements(d)
    return _seal(bytearray((MAGIC, 0xE0 | VERSION, _NON_FINITE | DTYPES.index(dtype), 0, 0)) + _varint(d), [])


def _seal(head: bytearray, parts: list) -> np.ndarray:
    out = np.empty(len(head) + sum(part.size for part in parts) + 4, np.uint8)
    out[: len(head)] = np.frombuffer(head, np.uint8)
    at = len(head)
    for part in parts:
        out[at : at + part.size] = part
        at += part.size
    out[at:] = np.frombuffer(checksum(out[:at]), np.uint8)
    return out


def checksum(data: np.ndarray) -> bytes:
    """The 4 bytes at the end of a container. XXH3 runs at memory speed; XXH32 took half a memcpy."""
    return struct.pack("<I", xxhash.xxh3_64_intdigest(data) & 0xFFFFFFFF)


class _Reader:
    def __init__(self, head: bytes):
        self.head = head
        self.at = 0

    def byte(self, what: str) -> int:
        if self.at >= len(self.head):
            raise ContainerError(f"the buffer ends before {what}")
        self.at += 1
        return self.head[self.at - 1]

    def varint(self, what: str) -> int:
        number = 0
        for shift in range(0, 35, 7):
            byte = self.byte(what)
            number |= (byte & 127) << shift
            if byte < 128:
                if (byte == 0 and shift) or number >= 2**32:
                    break
                return number
        raise ContainerError(f"{what} is not a varint below 2**32 in its shortest form")


def as_bytes(buffer) -> np.ndarray:
    """A buffer (uint8 array, bytes, bytearray or memoryview) as uint8[n], without a copy."""
    if isinstance(buffer, np.ndarray):
        if buffer.dtype != np.uint8 or buffer.ndim != 1:
            raise ContainerError(f"a container is uint8[n], not {buffer.dtype} with {buffer.ndim} dimensions")
        return np.ascontiguousarray(buffer)
    try:
        return np.frombuffer(buffer, np.uint8)
    except (TypeError, ValueError, BufferError) as error:
        raise ContainerError(f"a container is a buffer of bytes, not {type(buffer).__name__}: {error}") from None


def parse(buffer, size: int | None = None, *, prefix: bool = False) -> Container:
    """Read the container in `buffer`, check its lengths and its checksum. Allocates nothing of its size.

    size: the element count that the caller expects; another one is refused. prefix: more may follow the container
    (its own length is `nbytes`); otherwise trailing bytes are refused. Raises ContainerError.
    """
    data = as_bytes(buffer)
    read = _Reader(data[:_MAX_HEADER].tobytes())
    if read.byte("the magic") != MAGIC:
        raise ContainerError("not a container: the magic is missing")
    version = read.byte("the version")
    if version >> 4 != 0xE:
        raise ContainerError("not a container: the magic is missing")
    if version & 15 != VERSION:
        raise ContainerError(f"container version {version & 15} is not known; this code reads version {VERSION}")
    flags = read.byte("the flags")
    if flags & 15 >= len(DTYPES):
        raise ContainerError(f"dtype code {flags & 15} is not known")
    index_id, value_id = read.byte("the index codec"), read.byte("the value codec")
    d = read.varint("d")
    if d > MAX_ELEMENTS:
        raise ContainerError(f"d = {d} is beyond the {MAX_ELEMENTS} elements of this version")
    if size is not None and d != size:
        raise ContainerError(f"the container holds {d} elements, {size} were expected")
    transform, domain = _read_transform(read, d) if flags & _TRANSFORM else (None, d)
    shape = _read_shape(read, d) if flags & _SHAPE else None
    non_finite = bool(flags & _NON_FINITE)
    k, index_length, value_length = (domain, 0, 0)
    if non_finite:
        if index_id or value_id or flags & (_ORDER | _TRANSFORM):
            raise ContainerError("a non-finite container has no codecs, no order and no transform")
    else:
        if index_id:
            k, index_length = read.varint("k"), read.varint("the index length")
            if k > domain:
                raise ContainerError(f"k = {k} is more than the {domain} elements that there are")
        value_length = read.varint("the value length")
        if value_id == 0:
            raise ContainerError("the value codec is missing")
    order_length = (k * order_width(k) + 7) // 8 if flags & _ORDER else 0
    end = read.at + index_length + value_length + order_length
    if end + 4 > data.size:
        raise ContainerError(f"the sections need {end + 4} bytes, the buffer has {data.size}")
    if end + 4 < data.size and not prefix:
        raise ContainerError(f"{data.size - end - 4} bytes follow the container")
    if checksum(data[:end]) != data[end : end + 4].tobytes():
        raise ContainerError("the checksum does not match: the container was damaged")
    values_at = read.at + index_length
    return Container(
        d,
        domain,
        k,
        index_id,
        value_id,
        data[read.at : values_at],
        data[values_at : values_at + value_length],
        data[values_at + value_length : end] if flags & _ORDER else None,
        DTYPES[flags & 15],
        shape,
        transform,
        non_finite,
        end + 4,
    )


def _read_transform(read: _Reader, d: int) -> tuple[tuple[int, bytes], int]:
    """(id and parameters, elements of what is encoded)."""
    id, length = read.byte("the transform"), read.varint("the length of the transform's parameters")
    if length > _MAX_PARAMETERS:
        raise ContainerError(f"{length} bytes of transform parameters, {_MAX_PARAMETERS} at most")
    parameters = bytes(read.byte("the transform's parameters") for _ in range(length))
    transform = registry.by_id("transform", id)
    if transform is None:
        raise ContainerError(f"transform {id} is not known")
    domain = transform.domain(parameters, d)
    if domain > MAX_ELEMENTS:
        raise ContainerError(f"{domain} coefficients are beyond the {MAX_ELEMENTS} elements of this version")
    return (id, parameters), domain


def _read_shape(read: _Reader, d: int) -> tuple[int, ...]:
    ndim = read.byte("the number of dimensions")
    if ndim > _MAX_NDIM:
        raise ContainerError(f"{ndim} dimensions, {_MAX_NDIM} at most")
    shape = tuple(read.varint("the shape") for _ in range(ndim))
    if math.prod(shape) != d:
        raise ContainerError(f"shape {shape} does not have {d} elements")
    return shape


def split(buffer, count: int, size: int) -> list[Container]:
    """The at most `count` containers that stand one after the other in `buffer`, each of `size` elements: those of the ranks
    that sent one."""
    data = as_bytes(buffer)
    found = []
    while data.size and len(found) < count:
        found.append(parse(data, size, prefix=True))
        data = data[found[-1].nbytes :]
    if data.size:
        raise ContainerError(f"{data.size} bytes follow the {count} containers")
    return found
