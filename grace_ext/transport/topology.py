"""Which ranks share a host: known by what each says of its own."""

import os
import socket

import numpy as np
import xxhash

#: In the environment of a rank: what to take for its host's name. Ranks with the same one count as being on one host, for
#: groups that hosts do not tell: racks, sites, the sockets of a large machine.
HOSTNAME_VARIABLE = "GRACE_EXT_HOSTNAME"
HOST_BYTES = 8  # of `own_host_digest`


def own_host_digest() -> np.ndarray:
    """uint8[HOST_BYTES], the same on all ranks of a host and on no others'."""
    name = os.environ.get(HOSTNAME_VARIABLE)
    # Hosts may have a name in common ("localhost"), and containers of one machine share its boot.
    parts = (socket.gethostname(), boot_id()) if name is None else (name,)
    return np.frombuffer(xxhash.xxh64_digest(repr(parts).encode("utf-8", "surrogateescape")), np.uint8).copy()


def number_hosts(gathered: np.ndarray) -> tuple[int, ...]:
    """gathered: uint8[ranks, HOST_BYTES], every rank's `own_host_digest` -> the number of each rank's host; see Transport.hosts."""
    numbers: dict[bytes, int] = {}
    return tuple(numbers.setdefault(row.tobytes(), len(numbers)) for row in gathered)


def boot_id() -> str:
    """What Linux calls this run of the machine; "" where there is no Linux."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return file.read()
    except OSError:
        return ""
