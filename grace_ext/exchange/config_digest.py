"""Whether all ranks were built alike: each tells the others a digest of its configuration, and which host it is on."""

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import xxhash

from ..errors import ConfigError
from ..observe.listener import StepListener
from ..policy.schedules import Schedules
from ..transport import topology
from ..transport.base import Transport
from .buckets import Bucket


class Configured(Protocol):
    """What the ranks compare of an exchange, which is an ExchangeSetup."""

    buckets: list[Bucket]
    schedules: Schedules
    transport: Transport
    weight: float
    seed: int

    @property
    def listeners(self) -> Sequence[StepListener]:
        """The listeners, in the order in which they hear of an event."""


def config_digest(exchange: Configured) -> np.ndarray:
    """Compute a digest of all that must be the same on all ranks before the first step, and one of this rank's host.

    Args:
        exchange: The Exchange.

    Returns:
        uint8[16]: 8 bytes of the configuration, and 8 of the host.

    Raises:
        ConfigError: A schedule is for an option that no spec has.
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
    return np.concatenate([np.frombuffer(digest, np.uint8), topology.own_host_digest()])


def check_config_digests(exchange: Configured, gathered: np.ndarray) -> None:
    """Compare the digests of all ranks, and tell the transport which ranks share a host.

    Args:
        exchange: The Exchange.
        gathered: uint8[ranks, 16], every rank's `config_digest`, in the order of ranks, in any shape.

    Raises:
        ConfigError: The ranks were not built alike.
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
