"""The wire format: assembling and parsing containers. docs/container-format.md is its specification."""

import math
from typing import NamedTuple

import numpy as np
import xxhash

from .. import registry
from .._util.head import HeaderReader, varint
from ..errors import ConfigError, ContainerError
from ..kernels import pack_bits, unpack_bits
from .byte_buffers import ByteBuffer, as_bytes

MAGIC, VERSION = 0x47, 1
MAX_ELEMENTS = 2**31 - 1
MAX_SECTION = 2**32  # bytes of a section are fewer
DTYPES = ("float32", "float16", "bfloat16", "float64")
_TRANSFORM, _NON_FINITE, _ORDER, _SHAPE = 0x80, 0x40, 0x20, 0x10
_MAX_NDIM, _MAX_PARAMETERS = 32, 16
_MAX_HEADER = 5 + 5 + 2 + _MAX_PARAMETERS + 1 + 5 * _MAX_NDIM + 3 * 5


class Container(NamedTuple):
    """A parsed container. Its sections are views of the buffer that it was parsed from.

    Attributes:
        d: Number of elements of the gradient.
        domain: Number of elements that are encoded; more than d if a transform has padded the gradient.
        k: Number of elements in the support.
        index_id: Id of the index codec; 0 for a dense container.
        value_id: Id of the value codec; 0 for a non-finite container.
        index_section: uint8[m], the positions of the support.
        value_section: uint8[m], the values.
        order_section: uint8[m], the order of the values; None if they are in ascending order of position.
        dtype: Name of the gradient's dtype on the sender.
        shape: The gradient's shape, or None if it is not stored.
        transform: Id and parameters of the transform, or None.
        non_finite: Whether the sender's gradient held a NaN or an Inf.
        nbytes: Length of the container.
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

    @property
    def is_sparse(self) -> bool:
        """Whether elements of the gradient are missing, and not only coefficients of a transform."""
        return bool(self.index_id) and self.k < self.domain and self.transform is None

    def order(self) -> np.ndarray | None:
        """Decode the order section.

        Returns:
            uint32[k], the place in the support of each decoded value; None if the values are in ascending order of position.

        Raises:
            ContainerError: The section is not a permutation, or unused bits are not 0.
        """
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
    """Return how many bits one entry of the order section has.

    Args:
        k: Number of elements in the support.

    Returns:
        The bit length of k - 1; 0 for k = 0.
    """
    return (k - 1).bit_length() if k > 0 else 0


def check_elements(d: int) -> None:
    """Check that a container can hold so many elements.

    Args:
        d: Number of elements.

    Raises:
        ConfigError: d is above MAX_ELEMENTS.
    """
    if d > MAX_ELEMENTS:
        raise ConfigError(f"a tensor of {d} elements is too large for one container ({MAX_ELEMENTS} at most): split it")


def check_section(size: int, what: str = "a section") -> None:
    """Check that a container can hold a section of so many bytes.

    Args:
        size: Number of bytes.
        what: What it is, for the message.

    Raises:
        ConfigError: There are MAX_SECTION bytes or more.
    """
    if size >= MAX_SECTION:
        raise ConfigError(f"{what} of {size} bytes is too large for one container (below {MAX_SECTION}): split the tensor")


def pack(
    d: int,
    k: int,
    index_id: int,
    index_section: np.ndarray,
    value_id: int,
    value_section: np.ndarray,
    *,
    order: np.ndarray | None = None,
    dtype: str = "float32",
    shape: tuple[int, ...] | None = None,
    transform: tuple[int, bytes] | None = None,
) -> np.ndarray:
    """Assemble a container.

    Args:
        d: Number of elements of the gradient.
        k: Number of elements in the support.
        index_id: Id of the index codec; 0 for a dense container, which has no index section.
        index_section: uint8[m].
        value_id: Id of the value codec.
        value_section: uint8[m].
        order: uint32[k], the place in the support of each encoded value, or None.
        dtype: Name of the gradient's dtype.
        shape: Shape to be stored, or None.
        transform: Id and parameters of the transform, or None.

    Returns:
        The container, uint8[m].

    Raises:
        ConfigError: There are too many elements or bytes, or the shape does not fit d or has too large a size.
    """
    check_elements(d)
    for section in (index_section, value_section) if index_id else (value_section,):
        check_section(section.size)
    flags = (_ORDER if order is not None else 0) | (_SHAPE if shape is not None else 0)
    flags |= _TRANSFORM if transform is not None else 0
    head = bytearray((MAGIC, 0xE0 | VERSION, flags | DTYPES.index(dtype), index_id, value_id))
    head += varint(d)
    if transform is not None:
        head += bytes((transform[0], len(transform[1]))) + transform[1]
    if shape is not None:
        if len(shape) > _MAX_NDIM or math.prod(shape) != d:
            raise ConfigError(f"shape {shape} does not fit {d} elements in at most {_MAX_NDIM} dimensions")
        if any(size > MAX_ELEMENTS for size in shape):  # where another size is 0
            raise ConfigError(f"shape {shape} has a size above {MAX_ELEMENTS}")
        head.append(len(shape))
        for size in shape:
            head += varint(size)
    parts = [value_section]
    if index_id:
        head += varint(k) + varint(index_section.size)
        parts.insert(0, index_section)
    head += varint(value_section.size)
    if order is not None:
        packed = np.zeros((k * order_width(k) + 7) // 8, np.uint8)
        pack_bits(order, order_width(k), packed)
        parts.append(packed)
    return _seal(head, parts)


def pack_non_finite(d: int, dtype: str = "float32") -> np.ndarray:
    """Assemble the container of a gradient that holds a NaN or an Inf.

    Args:
        d: Number of elements of the gradient.
        dtype: Name of the gradient's dtype.

    Returns:
        The container, uint8[m], which has no sections.

    Raises:
        ConfigError: There are too many elements.
    """
    check_elements(d)
    return _seal(bytearray((MAGIC, 0xE0 | VERSION, _NON_FINITE | DTYPES.index(dtype), 0, 0)) + varint(d), [])


def _seal(head: bytearray, parts: list) -> np.ndarray:
    out = bytearray().join([head, *(part.data for part in parts), bytes(4)])
    out[-4:] = checksum(memoryview(out)[:-4])
    return np.frombuffer(out, np.uint8)


def checksum(data: memoryview) -> bytes:
    """Compute the checksum at the end of a container: the lower 32 bits of XXH3-64.

    XXH3 runs at the speed of memory, while XXH32 takes half as long as a copy.

    Args:
        data: The bytes that precede the checksum, contiguous.

    Returns:
        4 bytes.
    """
    return (xxhash.xxh3_64_intdigest(data) & 0xFFFFFFFF).to_bytes(4, "little")


def parse(buffer: ByteBuffer, size: int | None = None, *, prefix: bool = False) -> Container:
    """Parse the container in a buffer, and check its lengths and its checksum.

    Nothing of the container's size is allocated.

    Args:
        buffer: uint8[n], bytes, bytearray or memoryview.
        size: The number of elements that the caller expects, another one being refused; None for any.
        prefix: Whether more bytes may follow the container, whose own length is `nbytes`; otherwise they are refused.

    Returns:
        The parsed container.

    Raises:
        ContainerError: The buffer does not hold such a container.
    """
    data = as_bytes(buffer)
    read = HeaderReader(data[:_MAX_HEADER].tobytes())
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
    if checksum(data[:end].data) != data[end : end + 4].tobytes():
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


def _read_transform(read: HeaderReader, d: int) -> tuple[tuple[int, bytes], int]:
    """Return (id and parameters of the transform, number of coefficients)."""
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


def _read_shape(read: HeaderReader, d: int) -> tuple[int, ...]:
    ndim = read.byte("the number of dimensions")
    if ndim > _MAX_NDIM:
        raise ContainerError(f"{ndim} dimensions, {_MAX_NDIM} at most")
    shape = tuple(read.varint("the shape") for _ in range(ndim))
    if math.prod(shape) != d:
        raise ContainerError(f"shape {shape} does not have {d} elements")
    return shape


def split(buffer: ByteBuffer, count: int, size: int) -> list[Container]:
    """Parse containers that stand one after the other: those of the ranks that have sent one.

    Args:
        buffer: uint8[n], bytes, bytearray or memoryview.
        count: The largest number of containers to accept.
        size: The number of elements that each container must have.

    Returns:
        The parsed containers, in order.

    Raises:
        ContainerError: One of them is damaged, or more bytes follow.
    """
    data = as_bytes(buffer)
    found: list[Container] = []
    while data.size and len(found) < count:
        found.append(parse(data, size, prefix=True))
        data = data[found[-1].nbytes :]
    if data.size:
        raise ContainerError(f"{data.size} bytes follow the {count} containers")
    return found
