"""Communicator `hierarchical`."""

import dataclasses
import functools
import time
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from .._util.rng import Stream
from ..errors import ContainerError, ExchangeError
from ..pipeline.compressor import Compressor, make_compressor
from ..registry import register
from ..transport.base import Transport
from ._compressed_sums import (
    NO_BYTES,
    InFlightSum,
    UnreadableContainers,
    lossless_compressor,
    parse_containers,
    report_unreadable,
)
from .allgather import Allgather
from .allreduce import Allreduce
from .base import Communicator, Pending, wait
from .places import Place, Placed
from .slices import equal_slices, non_empty, sizes_in_slice, stream_of_slice


@dataclasses.dataclass(frozen=True)
class _Roles:
    """What a rank does for the others.

    local: the ranks on its host. owners: the owners of the slices on its host, in order. own: the number of its own slice,
    or None. peers: the owners of the same slice on all hosts, itself included. hosts: the number of hosts.
    """

    local: tuple[int, ...]
    owners: tuple[int, ...]
    own: int | None
    peers: tuple[int, ...]
    hosts: int


@functools.lru_cache(maxsize=64)
def roles_of(hosts: tuple[int, ...], rank: int) -> _Roles:
    """Return what a rank does for the others. There are as many slices as the smallest host has ranks.

    Args:
        hosts: The number of each rank's host; see Transport.hosts.
        rank: The rank.

    Returns:
        Its role.
    """
    members: dict[int, list[int]] = {}
    for other, host in enumerate(hosts):
        members.setdefault(host, []).append(other)
    count = min(map(len, members.values()))
    local = members[hosts[rank]]
    own = local.index(rank) if rank in local[:count] else None
    peers = () if own is None else tuple(ranks[own] for ranks in members.values())
    return _Roles(tuple(local), tuple(local[:count]), own, peers, len(members))


@dataclasses.dataclass
class _PendingLevels(InFlightSum):
    """An exchange under way.

    parts: the slices. gradient: float32[d]; None on a rank without one. state: (residual, buffer for the next one), or None.
    sizes: of the tensors in the own slice. phase: the number of the collective under way.
    """

    roles: _Roles
    parts: list[slice]
    gradient: Any | None
    state: tuple | None
    sizes: tuple[int, ...]
    phase: int = 0

    @property
    def own(self) -> slice:
        """The own slice; an empty one on a rank that owns none."""
        return slice(0, 0) if self.roles.own is None else self.parts[self.roles.own]

    @property
    def n(self) -> int:
        """Number of elements of the own slice."""
        return self.own.stop - self.own.start


@register
class Hierarchical(Placed, Communicator):
    """Dense sums inside each host, and containers between hosts.

    The ranks of a host sum their gradients as they are, in shared memory or over the loopback, and hosts send each other the
    compressed sums. It takes three alltoalls. With S ranks on the smallest host, the first S ranks of each host own a slice
    each. They get their host's gradients there, compress the sum, and send it to the owners of the same slice on the other
    hosts; then they forward all hosts' containers to the ranks of their own host. So it is a host, not a rank, that sends a
    container to each other host. The error of a slice is in its owner's residual; what other ranks' residuals hold, as after
    a change of ranks, goes to the owner with the next gradient.

    Dense values inside a host carry no checksum, as in every allreduce. `bytes_out` counts what goes to other hosts. With
    one rank on each host this is `allgather`. With a single host nothing is compressed: an allreduce in float32 sums
    everything.

    Source:
        Shi et al., Towards scalable distributed training of deep learning on public cloud clusters, MLSys 2021, take the
        same steps for top-k (HiTopKComm): a host's ranks own a slice each, so that all of them compress and send at the same
        time.
    """

    name = "hierarchical"
    collectives = ("alltoall", "alltoall", "alltoall")
    reports_support = False

    def collectives_of(self, transport: Transport) -> tuple[str, ...]:
        flat = self._single_level(transport)
        return flat.collectives if flat else self.collectives

    def wire_copies(self, transport: Transport) -> float:
        return super().wire_copies(transport) if self._single_level(transport) else 1

    def allreduce_dtype(self, compressor: Compressor) -> str:
        return "float32"

    def start(
        self,
        transport: Transport,
        name: str,
        compressor: Compressor,
        gradient: Any,
        state: tuple | None,
        stream: Stream,
        sizes: tuple[int, ...] | None = None,
    ) -> Pending:
        if flat := self._single_level(transport):
            return flat.start(transport, name, _compressor_for(flat, compressor), gradient, state, stream, sizes)
        pending = _new_pending(transport, name, compressor, len(gradient), gradient, state, stream, sizes, self.place)
        if state is not None:
            started = time.perf_counter()
            for part in _other_slices(pending):
                self.place.add(gradient[part], state[0][part], gradient[part])
            pending.add_seconds({"residual": time.perf_counter() - started})
        splits = [0] * transport.size
        for owner, part in zip(pending.roles.owners, pending.parts, strict=True):
            splits[owner] = 4 * (part.stop - part.start)
        pending.handle = transport.alltoall(f"{name}.local", self.place.to_bytes(gradient, transport), splits)
        return pending

    def start_empty(
        self,
        transport: Transport,
        name: str,
        compressor: Compressor,
        size: int,
        stream: Stream,
        sizes: tuple[int, ...] | None = None,
    ) -> Pending:
        if flat := self._single_level(transport):
            return flat.start_empty(transport, name, _compressor_for(flat, compressor), size, stream, sizes)
        pending = _new_pending(transport, name, lossless_compressor(), size, None, None, stream, sizes, self.place)
        pending.handle = transport.alltoall(f"{name}.local", NO_BYTES, [0] * transport.size)
        return pending

    def advance(self, pending: Any, transport: Transport) -> None:
        if self._single_level(transport) or pending.phase == 2:
            return
        sent = pending.wire_bytes
        received = wait(pending)
        pending.phase += 1
        if pending.phase == 1:
            pending.wire_bytes = sent  # the padding of that collective stays on the host
            self._between_hosts(pending, transport, received)
        else:
            self._inside_host(pending, transport, received)

    @staticmethod
    def _between_hosts(pending: _PendingLevels, transport: Transport, received: Any) -> None:
        """Sum the own slice over the host, and start to send its container to the owners on other hosts."""
        if pending.state is not None:
            for part in _other_slices(pending):
                pending.state[1][part] = 0
        payload = NO_BYTES
        if pending.n:
            try:
                payload = _encode_host_sum(pending, received)
            except ContainerError as error:
                pending.unreadable, payload = error, report_unreadable(transport.rank)
        splits = _splits_for(pending.roles.peers, payload, transport)
        pending.handle = transport.alltoall(f"{pending.name}.hosts", np.tile(payload, len(pending.roles.peers)), splits)
        pending.wire_bytes += (pending.roles.hosts - 1) * payload.size

    @staticmethod
    def _inside_host(pending: _PendingLevels, transport: Transport, received: np.ndarray) -> None:
        """Start to forward the own slice's containers to the ranks of this host, or the report of an error to all ranks."""
        started = time.perf_counter()
        receivers: Sequence[int] = pending.roles.local
        payload = received
        try:
            parse_containers(pending.name, received, [pending.n] * pending.roles.hosts if pending.n else [])
        except (ContainerError, UnreadableContainers) as error:
            pending.unreadable = pending.unreadable or error
            receivers, payload = range(transport.size), report_unreadable(getattr(error, "rank", transport.rank))
        pending.add_seconds({"decode": time.perf_counter() - started})
        splits = _splits_for(receivers, payload, transport)
        pending.handle = transport.alltoall(f"{pending.name}.all", np.tile(payload, len(receivers)), splits)

    def finish(self, pending: Any, transport: Transport, out: Any, weight: float) -> bool:
        if flat := self._single_level(transport):
            return flat.finish(pending, transport, out, weight)
        while pending.phase < 2:
            self.advance(pending, transport)
        sent = pending.wire_bytes
        data = wait(pending)
        pending.wire_bytes = sent
        return pending.decode_slices(data, non_empty(pending.parts), out, weight, pending.roles.hosts)

    def _single_level(self, transport: Transport) -> Communicator | None:
        """Return the communicator to use where there is only one level, else None."""
        if transport.hosts is None:
            raise ExchangeError(
                "communicator 'hierarchical' does not know yet which ranks share a host: "
                "call Exchange.check_config_digests with what all ranks' config_digest gave"
            )
        hosts = max(transport.hosts) + 1
        if hosts == 1:
            return Allreduce().at(self.place)
        return Allgather().at(self.place) if hosts == transport.size else None


@functools.cache
def _float32_compressor() -> Compressor:
    return make_compressor("dense/raw")


def _compressor_for(flat: Communicator, compressor: Compressor) -> Compressor:
    """Return what a communicator of a single level compresses with: what is on one host is summed in float32."""
    return _float32_compressor() if isinstance(flat, Allreduce) else compressor


def _new_pending(
    transport: Transport,
    name: str,
    compressor: Compressor,
    d: int,
    gradient: Any | None,
    state: tuple | None,
    stream: Stream,
    sizes: tuple[int, ...] | None,
    place: Place,
) -> _PendingLevels:
    roles = roles_of(transport.hosts, transport.rank)
    pending = _PendingLevels(
        None, 0, {}, name, compressor, stream, roles, equal_slices(d, len(roles.owners)), gradient, state, (), place=place
    )
    pending.sizes = sizes_in_slice((d,) if sizes is None else sizes, pending.own)
    return pending


def _other_slices(pending: _PendingLevels) -> list[slice]:
    """Return the slices outside the own one."""
    return [slice(0, pending.own.start), slice(pending.own.stop, pending.parts[-1].stop)]


def _splits_for(ranks: Iterable[int], payload: np.ndarray, transport: Transport) -> list[int]:
    """Return the splits with which each of these ranks gets the payload."""
    splits = [0] * transport.size
    for rank in ranks:
        splits[rank] = payload.size
    return splits


def _encode_host_sum(pending: _PendingLevels, received: Any) -> np.ndarray:
    """Return the container of the own slice's sum over this host, in the order of ranks (those that joined sent none)."""
    started = time.perf_counter()
    if len(received) % (4 * pending.n) or len(received) > 4 * pending.n * len(pending.roles.local):
        raise ContainerError(f"{len(received)} bytes came from the ranks of this host for a slice of {pending.n} elements")
    residual = pending.state and (pending.state[0][pending.own], pending.state[1][pending.own])
    summed = residual[1] if residual else pending.place.empty("hierarchical", pending.n)
    summed[:] = 0
    pending.place.add_received(received, summed)
    pending.add_seconds({"decode": time.perf_counter() - started})
    return pending.encode(summed, residual, stream_of_slice(pending.stream, pending.roles.own), pending.sizes)
