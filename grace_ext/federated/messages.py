"""What goes between server and clients: a header, and containers one after the other.

Both directions begin with the magic, a byte for the version, a byte for the kind and uint32 fields, little-endian. Down: the
round; the round after which this client's model is as the containers expect it, or FRESH: they expect zeros; the last round
whose update of this client was taken (0: none); and how many containers follow. Up: the round; the round after whose update
the server's estimate of this client's updates is as the container expects it, or 0: it expects zeros, or WHOLE: it is the
update itself and corrects no estimate; and float64 samples; one container follows. The header ends with its checksum, which
is that of containers.

Version 1 had no second field up. A change to the fields is a new version, in both directions.
"""

import dataclasses
import math
import struct

import numpy as np

from .. import registry
from ..errors import ContainerError, GraceError
from ..pipeline import container
from ..pipeline.container import Container

_MAGIC, _VERSION = b"GXF", ord("2")
_DOWN, _UP = struct.Struct("<3sBBIIII"), struct.Struct("<3sBBIId")
_KINDS = {"down": 1, "up": 2}
FRESH = WHOLE = 2**32 - 1  # bases
_CHECKSUM = len(container.checksum(np.empty(0, np.uint8)))
_HEADER = 64  # bytes that a container may have beside its sections


class Rejected(GraceError, ValueError):
    """An update that the server does not take. reason: one of REASONS; the message has the numbers."""

    def __init__(self, reason: str, text: str):
        super().__init__(f"{reason}: {text}")
        self.reason = reason


#: malformed: no such message, or no container of the model's size; oversized: more bytes than any container needs; late: of
#: another round; samples: no count above 0; estimate: a correction of what the server does not have; sparse: not all
#: elements, where the server's mean needs them; not finite: a NaN or an Inf; norm: much larger than those of others.
REASONS = ("malformed", "oversized", "late", "samples", "estimate", "sparse", "not finite", "norm")


@dataclasses.dataclass(frozen=True)
class Down:
    round: int
    base: int
    taken: int
    containers: list[np.ndarray]

    def pack(self) -> np.ndarray:
        """uint8[m]"""
        head = _DOWN.pack(_MAGIC, _VERSION, _KINDS["down"], self.round, self.base, self.taken, len(self.containers))
        return _joined(head, *self.containers)


@dataclasses.dataclass(frozen=True)
class Up:
    round: int
    samples: float
    container: np.ndarray
    base: int = WHOLE

    def pack(self) -> np.ndarray:
        """uint8[m]"""
        return _joined(_UP.pack(_MAGIC, _VERSION, _KINDS["up"], self.round, self.base, self.samples), self.container)


def _joined(head: bytes, *containers: np.ndarray) -> np.ndarray:
    head = np.frombuffer(head, np.uint8)
    return np.concatenate([head, np.frombuffer(container.checksum(head), np.uint8), *containers])


def largest(size: int) -> int:
    """Bytes of an update of so many elements that no container has to go beyond, whatever its transform: positions and
    values as they are, of the elements and of what transforms fill them up with."""
    padding = max((registry.lookup("transform", name).most_padding for name in registry.names("transform")), default=0)
    return _largest(size + padding)


def _largest(domain: int) -> int:
    """The same of an update of so many coefficients, or elements without a transform."""
    return _UP.size + _CHECKSUM + 8 * domain + _HEADER


def read_down(data: np.ndarray, size: int) -> tuple[Down, list[Container]]:
    """data: uint8[m]. Raises ContainerError."""
    head, rest = _head(_DOWN, "down", container.as_bytes(data))
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


def as_message(data) -> np.ndarray:
    """A buffer of bytes as uint8[m], without a copy. Raises Rejected."""
    try:
        return container.as_bytes(data)
    except ContainerError as error:
        raise Rejected("malformed", str(error)) from error


def read_up(data: np.ndarray, size: int) -> tuple[Up, Container]:
    """data: uint8[m], of which a copy is kept. Raises Rejected."""
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
        raise ContainerError(f"this is no message of the kind {kind!r}")
    if version != _VERSION:
        raise ContainerError(f"a message of version {chr(version)!r}; this code reads and writes version {chr(_VERSION)!r}")
    if data[layout.size : end].tobytes() != container.checksum(data[: layout.size]):
        raise ContainerError("the header's checksum is wrong")
    return tuple(fields), data[end:]
