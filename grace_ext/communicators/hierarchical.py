"""Communicator `hierarchical`."""

import dataclasses
import functools
import time
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from .._util.rng import Stream
from .._util.scratch import scratch
from ..errors import ContainerError, ExchangeError
from ..pipeline.compressor import Compressor, make_compressor
from ..pipeline.decoder import decode_sum
from ..registry import register
from ..transport.base import Transport
from ._compressed_sums import InFlightSum, UnreadableContainers, lossless_compressor, parse_containers, report_unreadable
from ._slices import equal_slices, sizes_in_slice, stream_of_slice
from .allgather import Allgather
from .allreduce import Allreduce
from .base import Communicator, Pending, wait

_NOTHING = np.empty(0, np.uint8)


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
class _Step(InFlightSum):
    """An exchange under way.

    parts: the slices. gradient: float32[d]; None on a rank without one. state: (residual, room for the next one), or None.
    sizes: of the tensors in the own slice. phase: the number of the collective under way.
    """

    roles: _Roles
    parts: list[slice]
    gradient: np.ndarray | None
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
class Hierarchical(Communicator):
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
        flat = _flat(transport)
        return flat.collectives if flat else self.collectives

    def copies_sent(self, transport: Transport) -> float:
        return super().copies_sent(transport) if _flat(transport) else 1

    def allreduce_dtype(self, compressor: Compressor) -> str:
        return "float32"

    def start(
        self,
        transport: Transport,
        name: str,
        compressor: Compressor,
        gradient: np.ndarray,
        state: tuple[np.ndarray, np.ndarray] | None,
        stream: Stream,
        sizes: tuple[int, ...] | None = None,
    ) -> Pending:
        if flat := _flat(transport):
            made = _plain() if flat is _SUM else compressor
            return flat.start(transport, name, made, gradient, state, stream, sizes)
        step = _begun(transport, name, compressor, gradient.size, gradient, state, stream, sizes)
        if state is not None:
            started = time.perf_counter()
            for part in _others(step):
                with np.errstate(over="ignore", invalid="ignore"):  # an Inf or NaN makes the container a non-finite one
                    gradient[part] += state[0][part]
            step.add_seconds({"residual": time.perf_counter() - started})
        splits = [0] * transport.size
        for owner, part in zip(step.roles.owners, step.parts, strict=True):
            splits[owner] = 4 * (part.stop - part.start)
        step.handle = transport.alltoall(f"{name}.local", gradient.view(np.uint8), splits)
        return step

    def start_empty(
        self,
        transport: Transport,
        name: str,
        compressor: Compressor,
        size: int,
        stream: Stream,
        sizes: tuple[int, ...] | None = None,
    ) -> Pending:
        if flat := _flat(transport):
            return flat.start_empty(transport, name, _plain() if flat is _SUM else compressor, size, stream, sizes)
        step = _begun(transport, name, lossless_compressor(), size, None, None, stream, sizes)
        step.handle = transport.alltoall(f"{name}.local", _NOTHING, [0] * transport.size)
        return step

    def advance(self, step: Any, transport: Transport) -> None:
        if _flat(transport) or step.phase == 2:
            return
        sent = step.wire_bytes
        received = wait(step)
        step.phase += 1
        if step.phase == 1:
            step.wire_bytes = sent  # the padding of that collective stays on the host
            self._between_hosts(step, transport, received)
        else:
            self._inside_host(step, transport, received)

    @staticmethod
    def _between_hosts(step: _Step, transport: Transport, received: np.ndarray) -> None:
        """Sum the own slice over the host, and start to send its container to the owners on other hosts."""
        if step.state is not None:
            for part in _others(step):
                step.state[1][part] = 0
        payload = _NOTHING
        if step.n:
            try:
                payload = _container(step, received)
            except ContainerError as error:
                step.unreadable, payload = error, report_unreadable(transport.rank)
        splits = _to(step.roles.peers, payload, transport)
        step.handle = transport.alltoall(f"{step.name}.hosts", np.tile(payload, len(step.roles.peers)), splits)
        step.wire_bytes += (step.roles.hosts - 1) * payload.size

    @staticmethod
    def _inside_host(step: _Step, transport: Transport, received: np.ndarray) -> None:
        """Start to forward the own slice's containers to the ranks of this host, or the report of an error to all ranks."""
        started = time.perf_counter()
        receivers: Sequence[int] = step.roles.local
        payload = received
        try:
            parse_containers(step.name, received, [step.n] * step.roles.hosts if step.n else [])
        except (ContainerError, UnreadableContainers) as error:
            step.unreadable = step.unreadable or error
            receivers, payload = range(transport.size), report_unreadable(getattr(error, "rank", transport.rank))
        step.add_seconds({"decode": time.perf_counter() - started})
        splits = _to(receivers, payload, transport)
        step.handle = transport.alltoall(f"{step.name}.all", np.tile(payload, len(receivers)), splits)

    def finish(self, step: Any, transport: Transport, out: np.ndarray, weight: float) -> bool:
        if flat := _flat(transport):
            return flat.finish(step, transport, out, weight)
        while step.phase < 2:
            self.advance(step, transport)
        sent = step.wire_bytes
        data = wait(step)
        step.wire_bytes = sent
        if step.unreadable is not None:
            raise step.unreadable
        started = time.perf_counter()
        parts, hosts = [part for part in step.parts if part.stop > part.start], step.roles.hosts
        containers = parse_containers(step.name, data, [part.stop - part.start for part in parts for _ in range(hosts)])
        for i, part in enumerate(parts):
            decode_sum(containers[i * hosts : (i + 1) * hosts], out[part], weight)
        finite = not any(one.non_finite for one in containers)
        if not finite:
            out[:] = np.nan
        step.add_seconds({"decode": time.perf_counter() - started})
        return finite


_SUM, _GATHER = Allreduce(), Allgather()


@functools.cache
def _plain() -> Compressor:
    return make_compressor("dense/raw")


def _flat(transport: Transport) -> Communicator | None:
    """Return the communicator to use where there is only one level, else None."""
    if transport.hosts is None:
        raise ExchangeError(
            "communicator 'hierarchical' does not know yet which ranks share a host: "
            "call Exchange.check_config_digests with what all ranks' config_digest gave"
        )
    hosts = max(transport.hosts) + 1
    return _SUM if hosts == 1 else _GATHER if hosts == transport.size else None


def _begun(
    transport: Transport,
    name: str,
    compressor: Compressor,
    d: int,
    gradient: np.ndarray | None,
    state: tuple[np.ndarray, np.ndarray] | None,
    stream: Stream,
    sizes: tuple[int, ...] | None,
) -> _Step:
    roles = roles_of(transport.hosts, transport.rank)
    step = _Step(None, 0, {}, name, compressor, stream, roles, equal_slices(d, len(roles.owners)), gradient, state, ())
    step.sizes = sizes_in_slice((d,) if sizes is None else sizes, step.own)
    return step


def _others(step: _Step) -> list[slice]:
    """Return the slices outside the own one."""
    return [slice(0, step.own.start), slice(step.own.stop, step.parts[-1].stop)]


def _to(ranks: Iterable[int], payload: np.ndarray, transport: Transport) -> list[int]:
    """Return the splits with which each of these ranks gets the payload."""
    splits = [0] * transport.size
    for rank in ranks:
        splits[rank] = payload.size
    return splits


def _container(step: _Step, received: np.ndarray) -> np.ndarray:
    """Return the container of the own slice's sum over this host, in the order of ranks (those that joined sent none)."""
    started = time.perf_counter()
    if received.size % (4 * step.n) or received.size > 4 * step.n * len(step.roles.local):
        raise ContainerError(f"{received.size} bytes came from the ranks of this host for a slice of {step.n} elements")
    summed = scratch("hierarchical", np.float32, step.n)
    summed[:] = 0
    with np.errstate(over="ignore", invalid="ignore"):  # an Inf or NaN makes the container a non-finite one
        for row in received.view(np.float32).reshape(-1, step.n):
            summed += row
    step.add_seconds({"decode": time.perf_counter() - started})
    residual = step.state and (step.state[0][step.own], step.state[1][step.own])
    return step.encode(summed, residual, stream_of_slice(step.stream, step.roles.own), step.sizes)
