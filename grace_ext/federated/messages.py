"""The messages between server and clients: a header, followed by containers.

A header begins with the magic, one byte for the version, one byte for the kind of message and uint32 fields; all numbers are
little-endian. It ends with a checksum, which is computed as that of containers.

A message down has these fields: the round; the round whose model the containers continue from, or FRESH if they continue
from zeros; the last round whose update of this client was accepted (0: none); and the number of containers that follow.

A message up has these fields: the round; a base; and, as float64, the number of samples. One container follows. The base is
the round after whose update the server's estimate of this client's updates is what the container corrects; 0 if it corrects
zeros; or WHOLE if the container holds the update itself and corrects no estimate.

In version 1, messages up had no base. A change to the fields is a new version, in both directions.
"""

import dataclasses
import math
import struct

import numpy as np

from .. import registry
from ..errors import ContainerError, GraceError
from ..pipeline import container
from ..pipeline.byte_buffers import ByteBuffer, as_bytes
from ..pipeline.container import Container

_MAGIC, _VERSION = b"GXF", ord("2")
_DOWN, _UP = struct.Struct("<3sBBIIII"), struct.Struct("<3sBBIId")
_KINDS = {"down": 1, "up": 2}
FRESH = WHOLE = 2**32 - 1  # bases
_CHECKSUM = len(container.checksum(memoryview(b"")))
_HEADER = 64  # bytes that a container may have beside its sections


class Rejected(GraceError, ValueError):
    """An update that the server does not accept.

    Args:
        reason: One of REASONS; it is kept as an attribute.
        text: The details, with the numbers.
    """

    def __init__(self, reason: str, text: str):
        super().__init__(f"{reason}: {text}")
        self.reason = reason


#: malformed: not a message, or no container of the model's size; oversized: more bytes than any container needs; late: for
#: another round; samples: not a number above 0; estimate: corrects an estimate that the server does not have; sparse: not all
#: elements, where the server's mean needs them; not finite: a NaN or an Inf; norm: much larger than those of others.
REASONS = ("malformed", "oversized", "late", "samples", "estimate", "sparse", "not finite", "norm")


@dataclasses.dataclass(frozen=True)
class Down:
    """A message from the server to a client.

    Attributes:
        round: Number of the round.
        base: The round whose model the containers continue from; FRESH: they continue from zeros.
        taken: The last round whose update of this client was accepted; 0: none.
        containers: uint8[m] each.
    """

    round: int
    base: int
    taken: int
    containers: list[np.ndarray]

    def pack(self) -> np.ndarray:
        """Write the message.

        Returns:
            uint8[m].
        """
        head = _DOWN.pack(_MAGIC, _VERSION, _KINDS["down"], self.round, self.base, self.taken, len(self.containers))
        return _joined(head, *self.containers)


@dataclasses.dataclass(frozen=True)
class Up:
    """A message from a client to the server.

    Attributes:
        round: Number of the round whose model the client has trained.
        samples: Number of samples that it says the update is from.
        container: uint8[m].
        base: The round of the estimate that the container corrects; 0: it corrects zeros; WHOLE: it is the update itself.
    """

    round: int
    samples: float
    container: np.ndarray
    base: int = WHOLE

    def pack(self) -> np.ndarray:
        """Write the message.

        Returns:
            uint8[m].
        """
        return _joined(_UP.pack(_MAGIC, _VERSION, _KINDS["up"], self.round, self.base, self.samples), self.container)


def _joined(head: bytes, *containers: np.ndarray) -> np.ndarray:
    first = np.frombuffer(head, np.uint8)
    return np.concatenate([first, np.frombuffer(container.checksum(first.data), np.uint8), *containers])


def largest(size: int) -> int:
    """Compute the largest size that a valid update needs, whatever its transform.

    That is the size with positions and values stored raw, of all elements and of those that transforms pad them with.

    Args:
        size: Number of elements of the model.

    Returns:
        The number of bytes.
    """
    padding = max((registry.lookup("transform", name).most_padding for name in registry.names("transform")), default=0)
    return _largest(size + padding)


def _largest(domain: int) -> int:
    """Compute the same for an update of so many coefficients or, without a transform, elements."""
    return _UP.size + _CHECKSUM + 8 * domain + _HEADER


def read_down(data: np.ndarray, size: int) -> tuple[Down, list[Container]]:
    """Read a message from the server to a client.

    Args:
        data: uint8[m].
        size: Number of elements of the model.

    Returns:
        The message, and its containers, parsed.

    Raises:
        ContainerError: The message is malformed.
    """
    head, rest = _head(_DOWN, "down", as_bytes(data))
    round_, base, taken, count = head
    if count != (1 if base == FRESH else round_ - base) or taken >= max(round_, 1):
        raise ContainerError(
            f"a message of round {round_} with {count} containers on top of round {base}, after an update of round {taken}"
        )
    parsed, blobs = [], []
    for _ in range(count):
        parsed.append(container.parse(rest, size, prefix=True))
        blobs.append(rest[: parsed[-1].nbytes])
        rest = rest[parsed[-1].nbytes :]
    if rest.size:
        raise ContainerError(f"{rest.size} bytes follow the {count} containers")
    return Down(round_, base, taken, blobs), parsed


def as_message(data: ByteBuffer) -> np.ndarray:
    """View a buffer of bytes as an array, without a copy.

    Args:
        data: Any buffer of bytes.

    Returns:
        uint8[m].

    Raises:
        Rejected: The argument is no buffer of bytes.
    """
    try:
        return as_bytes(data)
    except ContainerError as error:
        raise Rejected("malformed", str(error)) from error


def read_up(data: np.ndarray, size: int) -> tuple[Up, Container]:
    """Read a message from a client to the server.

    Args:
        data: uint8[m], of which a copy is kept.
        size: Number of elements of the model.

    Returns:
        The message, and its container, parsed.

    Raises:
        Rejected: The message is malformed, has more bytes than it can need, or has an impossible number of samples.
    """
    if data.size > largest(size):
        raise Rejected("oversized", f"{data.size} bytes; an update of {size} elements never has more than {largest(size)}")
    try:
        (round_, base, samples), rest = _head(_UP, "up", data.copy())
        parsed = container.parse(rest, size)
    except ContainerError as error:
        raise Rejected("malformed", str(error)) from error
    if data.size > _largest(parsed.domain):
        raise Rejected(
            "oversized",
            f"{data.size} bytes; an update of {parsed.domain} coefficients has at most {_largest(parsed.domain)}",
        )
    if not (math.isfinite(samples) and samples > 0):
        raise Rejected("samples", f"{samples}; allowed: finite and above 0")
    return Up(round_, samples, rest, base), parsed


def _head(layout: struct.Struct, kind: str, data: np.ndarray) -> tuple[tuple, np.ndarray]:
    end = layout.size + _CHECKSUM
    if data.size < end:
        raise ContainerError(f"{data.size} bytes; a message has at least {end}")
    magic, version, number, *fields = layout.unpack(data[: layout.size].tobytes())
    if magic != _MAGIC or number != _KINDS[kind]:
        raise ContainerError(f"this is not a message of the kind {kind!r}")
    if version != _VERSION:
        raise ContainerError(f"a message of version {chr(version)!r}; this code reads and writes version {chr(_VERSION)!r}")
    if data[layout.size : end].tobytes() != container.checksum(data[: layout.size].data):
        raise ContainerError("the header's checksum is wrong")
    return tuple(fields), data[end:]
