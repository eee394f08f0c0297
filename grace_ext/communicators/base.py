"""What a communicator promises."""

import dataclasses
import time

import numpy as np

from ..errors import ConfigError
from ..registry import Stage
from ..transport.base import CollectiveHandle, Transport


@dataclasses.dataclass
class Pending:
    """An exchange under way: the transport's handle, how many payload bytes this rank gave it, seconds per stage, the
    index codecs of this rank's containers, and the bytes of its gradient, None where that is dense."""

    handle: CollectiveHandle
    wire_bytes: int
    seconds: dict[str, float]
    index_codecs: list[str] = dataclasses.field(default_factory=list, kw_only=True)
    gradient_bytes: int | None = dataclasses.field(default=None, kw_only=True)
    #: Bytes of all ranks' containers, once they are there; the same on all ranks. None where others go.
    received: int | None = dataclasses.field(default=None, kw_only=True)
    #: Of this rank: its container, None if it sent none; and the positions that were sent, uint32[k], None for all. They may
    #: lie in scratch arrays of the thread: valid until its next exchange.
    container: np.ndarray | None = dataclasses.field(default=None, kw_only=True)
    support: np.ndarray | None = dataclasses.field(default=None, kw_only=True)

    #: The handle that was waited for last.
    last_waited: CollectiveHandle | None = dataclasses.field(default=None, kw_only=True, repr=False)
    #: Whether the gradients bypass the exchange, so that nothing is left to decode.
    bypasses = False

    def has_arrived(self) -> bool | None:
        """Whether nothing is left to wait for; None if that is not known. A handle that was waited for is not polled."""
        return self.handle is self.last_waited or self.handle.poll()

    def is_on_its_way(self) -> bool:
        """Whether a collective is known to be under way: sent, and not there yet."""
        return self.has_arrived() is False

    @property
    def codec_seconds(self) -> float:
        """All but waiting."""
        return sum(taken for stage, taken in self.seconds.items() if stage != "exchange")

    def add_seconds(self, seconds: dict[str, float]) -> None:
        """Add the seconds of some stages."""
        for stage, taken in seconds.items():
            self.seconds[stage] = self.seconds.get(stage, 0.0) + taken


class Communicator(Stage):
    """How one bucket is exchanged and reduced. All ranks end with the same bits."""

    kind = "communicator"
    #: The transport's collectives that a bucket goes through, each needing the one before: for adapters that have to name
    #: them before the first step, as nodes of a graph.
    collectives: tuple[str, ...] = ("allgather",)
    #: Whether what a rank sends is its container.
    sends_containers = False
    #: Whether `Pending.support` is known, when an exchange has started, for all of the gradient.
    reports_support = True
    #: Needs a compressor whose values can be summed as they are (`Compressor.reducible_dtype`).
    needs_reducible = False
    #: Whether the next step needs what the memory keeps.
    needs_memory = True
    #: Whether the gradient that `start` is given stays as it is.
    preserves_input = False
    #: Whether it takes another strategy where compression does not pay; then `strategy` tells which.
    switches = False
    #: "float32" or "fp16" while gradients may bypass the exchange: see Exchange.bypass_dtype.
    bypass_dtype: str | None = None

    def check(self, compressor) -> None:
        """Raise ConfigError if this communicator cannot carry what the compressor makes."""
        if compressor.lowrank is not None:
            raise ConfigError(
                f"communicator {self.name!r} cannot carry {str(compressor)!r}: factors have their own, "
                f"which Exchange.bucket chooses"
            )
        if self.needs_reducible and compressor.reducible_dtype is None:
            raise ConfigError(
                f"communicator {self.name!r} sums values as they are and cannot carry {str(compressor)!r}: "
                f"use allgather, or a spec with dense or randomk and raw or fp16 values"
            )

    def for_bucket(self, compressor, memory, transport: Transport, factors: "Communicator | None") -> "Communicator":
        """The communicator of one bucket. Here, the same for all but those of factors.

        Args:
            compressor, memory: the bucket's.
            factors: what can carry the factors of a low-rank compressor; None for another.

        Raises:
            ConfigError: the parts do not fit together.
        """
        return factors or self

    def collectives_of(self, transport: Transport) -> tuple[str, ...]:
        """The same where they depend on the number of ranks or on their hosts."""
        return self.collectives

    def copies_sent(self, transport: Transport) -> float:
        """How many times what a rank gives to collectives (`Pending.wire_bytes`) leaves it, on average: to all others, or
        along a ring. What is sharded goes to n - 1 ranks in a part of 1 / n, the rest to one: as in a ring."""
        ranks = transport.size
        return ranks - 1 if self.collectives_of(transport) == ("allgather",) else 2 * (ranks - 1) / ranks

    def allreduce_dtype(self, compressor) -> str:
        """The dtype of what goes into its allreduces."""
        return compressor.reducible_dtype or "float32"

    def start(self, transport: Transport, name: str, compressor, gradient: np.ndarray, state, stream, sizes=None) -> Pending:
        """Encode float32[d] and start its exchange. state: what `memory.begin` gave, or None. sizes: the elements of
        the tensors in it, None for one. The gradient may be the memory's room itself, and may be overwritten unless the
        communicator `preserves_input` it."""
        raise NotImplementedError

    def start_empty(self, transport: Transport, name: str, compressor, size: int, stream, sizes=None) -> Pending:
        """Take part with nothing: for a rank that has no gradient, float32[size], while others have."""
        return self.start(transport, name, compressor, np.zeros(size, np.float32), None, stream, sizes)

    def advance(self, pending: Pending, transport: Transport) -> None:
        """For exchanges of several collectives of which each needs the result of the one before: wait for that and start
        the next. `finish` does what is left."""

    def finish(self, pending: Pending, transport: Transport, out: np.ndarray, weight: float) -> bool:
        """Wait, and write weight * (sum over ranks) to out (float32[d]). False if some rank's gradient was not finite."""
        raise NotImplementedError


def wait(pending: Pending):
    """The result of the exchange; the time spent waiting is counted as exchange."""
    started = time.perf_counter()
    result, pending.last_waited = pending.handle.wait(), pending.handle
    pending.wire_bytes += pending.handle.padding
    pending.add_seconds({"exchange": time.perf_counter() - started + pending.handle.waited_seconds})
    return result
