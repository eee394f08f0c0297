"""Were all ranks built alike? Each tells the others a digest of its configuration, and what host it is on."""

import numpy as np
import xxhash

from ..errors import ConfigError
from ..transport import topology


def config_digest(exchange) -> np.ndarray:
    """uint8[16]: a digest of all that must be the same on all ranks before the first step, and one of this rank's host.

    Raises:
        ConfigError: a schedule is of an option that no spec has.
    """
    compressors = [bucket.declared for bucket in exchange.buckets]
    exchange.schedules.check(compressors)
    parts = [
        (
            b.name,
            str(b.declared),
            b.communicator.name,
            repr(b.memory),
            [(tensor.common_name, tensor.shape) for tensor in b.tensors],
        )
        for b in exchange.buckets
    ]
    parts += [*exchange.schedules.signature(compressors), *(one.signature() for one in exchange.listeners)]
    digest = xxhash.xxh64_digest(repr((parts, exchange.seed, exchange.weight)).encode())
    return np.concatenate([np.frombuffer(digest, np.uint8), topology.own_host()])


def check_config_digests(exchange, gathered: np.ndarray) -> None:
    """Compares what all ranks gave, and tells the transport which ranks share a host.

    Args:
        gathered: uint8[ranks, 16], every rank's `config_digest`, in the order of ranks, in any shape.

    Raises:
        ConfigError: ranks were not built alike.
    """
    rows = gathered.reshape(exchange.transport.size, -1)
    digests, hosts = np.split(rows, [-topology.HOST_BYTES], axis=1)
    other = [rank for rank, theirs in enumerate(digests) if theirs.tobytes() != digests[0].tobytes()]
    if other:
        raise ConfigError(
            f"ranks {other} have other parameters, specs or options than rank 0: all ranks must wrap the "
            f"same model in the same way"
        )
    exchange.transport.hosts = topology.number_hosts(hosts)
