"""Which ranks share a host: found out from what each rank tells of its own host."""

import os
import socket

import numpy as np
import xxhash

#: The environment variable that stands for the host's name. Ranks with the same value count as being on one host; so groups
#: other than hosts can be set: racks, sites, the sockets of a large machine.
HOSTNAME_VARIABLE = "GRACE_EXT_HOSTNAME"
HOST_BYTES = 8  # length of `own_host_digest`


def own_host_digest() -> np.ndarray:
    """Identify this host.

    Returns:
        uint8[HOST_BYTES], the same on all ranks of a host and different on other hosts.
    """
    name = os.environ.get(HOSTNAME_VARIABLE)
    # Hosts may have the same name ("localhost"), and containers on one machine have the same boot id.
    parts = (socket.gethostname(), boot_id()) if name is None else (name,)
    return np.frombuffer(xxhash.xxh64_digest(repr(parts).encode("utf-8", "surrogateescape")), np.uint8).copy()


def number_hosts(gathered: np.ndarray) -> tuple[int, ...]:
    """Number the hosts in the order of their first ranks.

    Args:
        gathered: uint8[ranks, HOST_BYTES], every rank's `own_host_digest`.

    Returns:
        The number of each rank's host; see Transport.hosts.
    """
    numbers: dict[bytes, int] = {}
    return tuple(numbers.setdefault(row.tobytes(), len(numbers)) for row in gathered)


def boot_id() -> str:
    """Identify the current boot of this machine.

    Returns:
        The id that Linux gives it; "" where there is no Linux.
    """
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return file.read()
    except OSError:
        return ""
