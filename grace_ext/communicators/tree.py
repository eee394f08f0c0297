"""Communicator `tree`."""

import dataclasses
import time
from typing import Any

import numpy as np

from .._util.rng import Stream
from ..errors import ContainerError, ExchangeError
from ..pipeline import container
from ..pipeline.compressor import Compressor
from ..registry import register
from ..transport.base import Transport
from ._compressed_sums import (
    NO_BYTES,
    InFlightSum,
    SummingCommunicator,
    check_readable,
    lossless_compressor,
    report_unreadable,
)
from .base import wait


@dataclasses.dataclass
class _PendingTree(InFlightSum):
    """An exchange under way.

    gradient: float32[d], to which the sums of the ranks below are added. level: the number of the collective under way.
    report: what to send in place of a container after an error.
    """

    gradient: Any
    state: tuple | None
    sizes: tuple[int, ...]
    level: int = -1
    report: np.ndarray | None = None


@register
class Tree(SummingCommunicator[_PendingTree]):
    """Sums go up a binary tree of the ranks, and the whole sum comes back to all.

    Rank r adds what the ranks r + 1, r + 2, r + 4, ... below it send to its own gradient, and sends its one container to the
    rank above; the root's goes to all. This takes ceil(log2 n) alltoalls, in which each rank sends to at most one other, and
    a broadcast: a rank sends one container up, and receives at most ceil(log2 n) + 1. A rank's residual is what its
    container left out of the sum, so all residuals together are what all ranks together owe. The density applies to each
    sum, and again to the final one, as with `sharded`, which sends as little and needs two collectives; but the tree's
    codecs see each bucket whole, and no container is cut into n.

    Source:
        Shi et al., A distributed synchronous SGD algorithm with global top-k sparsification for low bandwidth networks,
        ICDCS 2019, merges sparse gradients along such a tree and keeps what a merged one leaves out.
    """

    name = "tree"
    collectives = ("alltoall", "broadcast")

    def collectives_of(self, transport: Transport) -> tuple[str, ...]:
        return ("alltoall",) * _levels(transport.size) + ("broadcast",)

    def start(
        self,
        transport: Transport,
        name: str,
        compressor: Compressor,
        gradient: Any,
        state: tuple | None,
        stream: Stream,
        sizes: tuple[int, ...] | None = None,
    ) -> _PendingTree:
        pending = _PendingTree(None, 0, {}, name, compressor, stream, gradient, state, sizes, place=self.place)
        return self._started(pending, transport)

    def start_empty(
        self,
        transport: Transport,
        name: str,
        compressor: Compressor,
        size: int,
        stream: Stream,
        sizes: tuple[int, ...] | None = None,
    ) -> _PendingTree:
        zeros = self.place.zeros(size)
        pending = _PendingTree(None, 0, {}, name, lossless_compressor(), stream, zeros, None, None, place=self.place)
        return self._started(pending, transport)

    def _started(self, pending: _PendingTree, transport: Transport) -> _PendingTree:
        self._go_on(pending, transport)
        return pending

    def advance(self, pending: _PendingTree, transport: Transport) -> None:
        if pending.level < _levels(transport.size):
            self._receive(pending, transport, wait(pending))
            self._go_on(pending, transport)

    @staticmethod
    def _receive(pending: _PendingTree, transport: Transport, received: np.ndarray) -> None:
        """Add what the rank below has sent."""
        if transport.rank % 2 ** (pending.level + 1) or transport.rank + 2**pending.level >= transport.size:
            return
        started = time.perf_counter()
        try:
            check_readable(pending.name, received)
            pending.place.add_all([container.parse(received, len(pending.gradient))], pending.gradient)
        except ContainerError as error:
            pending.unreadable, pending.report = error, report_unreadable(transport.rank)
        except ExchangeError as error:
            pending.unreadable, pending.report = error, received
        pending.add_seconds({"decode": time.perf_counter() - started})

    def _go_on(self, pending: _PendingTree, transport: Transport) -> None:
        """Start the next collective."""
        pending.level += 1
        rank, distance, splits = transport.rank, 2**pending.level, [0] * transport.size
        payload = NO_BYTES
        if pending.level == _levels(transport.size):
            payload = self._payload(pending) if rank == 0 else payload
            pending.handle = transport.broadcast(f"{pending.name}.down", payload, 0)
        else:
            if rank % (2 * distance) == distance:
                payload = self._payload(pending)
                splits[rank - distance] = payload.size
            pending.handle = transport.alltoall(f"{pending.name}.up{pending.level}", payload, splits)
        pending.wire_bytes += payload.size

    @staticmethod
    def _payload(pending: _PendingTree) -> np.ndarray:
        if pending.report is not None:
            return pending.report
        return pending.encode(pending.gradient, pending.state, pending.stream, pending.sizes)

    def finish(self, pending: _PendingTree, transport: Transport, out: Any, weight: float) -> bool:
        while pending.level < _levels(transport.size):
            self.advance(pending, transport)
        return pending.decode_slices(wait(pending), [slice(0, len(out))], out, weight)


def _levels(ranks: int) -> int:
    return (ranks - 1).bit_length()
