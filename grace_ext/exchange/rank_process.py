"""A rank's process, as the other ranks of its machine see it."""

import os
import socket
import struct
from typing import NamedTuple

import numpy as np
import xxhash

from ..transport import topology
from .guard import look_at, state_of

LEAVES = b"grace_ext left"  # the name of a process that ends for another reason
_HOST = 48  # bytes of a host's name
_RECORD = struct.Struct(f"<8sIIQ{_HOST}s")


class Process(NamedTuple):
    """A rank as the others know it.

    Attributes:
        machine: Equal for ranks that see each other's processes, 8 bytes.
        rank: The rank.
        pid: Number of its process.
        started: When the process started, in the units of the machine's clock, because numbers are used again.
        host: Name of the host.
    """

    machine: bytes
    rank: int
    pid: int
    started: int
    host: str

    @classmethod
    def own(cls, rank: int) -> "Process":
        """Describe this process.

        Args:
            rank: Its rank.

        Returns:
            The description.
        """
        try:
            space = os.readlink("/proc/self/ns/pid")  # containers of one machine number their processes apart
            started = look_at(os.getpid())[2]
        except OSError:
            space, started = "", 0
        machine = xxhash.xxh64_digest(repr((topology.boot_id(), space)).encode())
        return cls(machine, rank, os.getpid(), started, socket.gethostname())

    def pack(self) -> np.ndarray:
        """Write a record of fixed size.

        Returns:
            uint8[m].
        """
        return np.frombuffer(_RECORD.pack(*self[:-1], self.host.encode("ascii", "replace")), np.uint8)

    @classmethod
    def unpack(cls, record: np.ndarray) -> "Process":
        """Read what `pack` has written.

        Args:
            record: uint8[m].

        Returns:
            The process.
        """
        machine, rank, pid, started, host = _RECORD.unpack(record.tobytes())
        return cls(machine, rank, pid, started, host.rstrip(b"\0").decode("ascii"))

    def is_leaving(self) -> bool:
        """Return whether the process is about to end, and not because others left it.

        Returns:
            Whether it is.
        """
        try:
            return look_at(self.pid)[0] == LEAVES
        except OSError:
            return False

    def state(self) -> str:
        """Return what the process does.

        Returns:
            "gone", "stopped" or "runs"; "runs" if it cannot be told.
        """
        return state_of(self.pid, self.started)
