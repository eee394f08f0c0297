"""Communicator `tree`."""

import dataclasses
import time

import numpy as np

from .._util.rng import Stream
from ..errors import ContainerError, ExchangeError
from ..pipeline import container
from ..pipeline.compressor import Compressor
from ..pipeline.decoder import decode_add, decode_sum
from ..registry import register
from ..transport.base import Transport
from ._compressed_sums import InFlightSum, SummingCommunicator, check_readable, lossless_compressor, report_unreadable
from .base import wait

_NOTHING = np.empty(0, np.uint8)


@dataclasses.dataclass
class _Step(InFlightSum):
    """An exchange under way.

    gradient: float32[d], to which the sums of the ranks below are added. level: the number of the collective under way.
    report: what to send in place of a container after an error.
    """

    gradient: np.ndarray
    state: tuple | None
    sizes: tuple[int, ...]
    level: int = -1
    report: np.ndarray | None = None


@register
class Tree(SummingCommunicator[_Step]):
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
        gradient: np.ndarray,
        state: tuple[np.ndarray, np.ndarray] | None,
        stream: Stream,
        sizes: tuple[int, ...] | None = None,
    ) -> _Step:
        return self._started(_Step(None, 0, {}, name, compressor, stream, gradient, state, sizes), transport)

    def start_empty(
        self,
        transport: Transport,
        name: str,
        compressor: Compressor,
        size: int,
        stream: Stream,
        sizes: tuple[int, ...] | None = None,
    ) -> _Step:
        return self._started(
            _Step(None, 0, {}, name, lossless_compressor(), stream, np.zeros(size, np.float32), None, None), transport
        )

    def _started(self, step: _Step, transport: Transport) -> _Step:
        self._go_on(step, transport)
        return step

    def advance(self, step: _Step, transport: Transport) -> None:
        if step.level < _levels(transport.size):
            self._receive(step, transport, wait(step))
            self._go_on(step, transport)

    @staticmethod
    def _receive(step: _Step, transport: Transport, received: np.ndarray) -> None:
        """Add what the rank below has sent."""
        if transport.rank % 2 ** (step.level + 1) or transport.rank + 2**step.level >= transport.size:
            return
        started = time.perf_counter()
        try:
            check_readable(step.name, received)
            with np.errstate(over="ignore", invalid="ignore"):  # an Inf or NaN makes the container a non-finite one
                decode_add(received, step.gradient)
        except ContainerError as error:
            step.unreadable, step.report = error, report_unreadable(transport.rank)
        except ExchangeError as error:
            step.unreadable, step.report = error, received
        step.add_seconds({"decode": time.perf_counter() - started})

    def _go_on(self, step: _Step, transport: Transport) -> None:
        """Start the next collective."""
        step.level += 1
        rank, distance, splits = transport.rank, 2**step.level, [0] * transport.size
        payload = _NOTHING
        if step.level == _levels(transport.size):
            payload = self._payload(step) if rank == 0 else payload
            step.handle = transport.broadcast(f"{step.name}.down", payload, 0)
        else:
            if rank % (2 * distance) == distance:
                payload = self._payload(step)
                splits[rank - distance] = payload.size
            step.handle = transport.alltoall(f"{step.name}.up{step.level}", payload, splits)
        step.wire_bytes += payload.size

    @staticmethod
    def _payload(step: _Step) -> np.ndarray:
        if step.report is not None:
            return step.report
        return step.encode(step.gradient, step.state, step.stream, step.sizes)

    def finish(self, step: _Step, transport: Transport, out: np.ndarray, weight: float) -> bool:
        while step.level < _levels(transport.size):
            self.advance(step, transport)
        data = wait(step)
        if step.unreadable is not None:
            raise step.unreadable
        check_readable(step.name, data)
        started = time.perf_counter()
        one = container.parse(data, out.size)
        decode_sum([one], out, weight)
        step.add_seconds({"decode": time.perf_counter() - started})
        return not one.non_finite


def _levels(ranks: int) -> int:
    return (ranks - 1).bit_length()
