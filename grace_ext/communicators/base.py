"""The interface of communicators."""

import dataclasses
import time
from typing import Any, Generic, Protocol, TypeVar

import numpy as np

from .._util.rng import Stream
from ..errors import ConfigError
from ..pipeline.compressor import Compressor
from ..pipeline.container import Container
from ..pipeline.square_sums import SquareSums
from ..registry import Stage
from ..transport.base import CollectiveHandle, Transport


@dataclasses.dataclass
class Pending:
    """The exchange of one bucket, under way.

    Attributes:
        handle: The handle of the collective under way.
        wire_bytes: Bytes that this rank has given to collectives.
        seconds: Seconds that each stage took.
        index_codecs: Names of the index codecs of this rank's containers.
        gradient_bytes: Bytes of this rank's gradient; None where it is dense.
        received: Bytes of all ranks' containers once they have arrived; else None.
        container: This rank's container, a new array, which others may keep; None if it has sent none.
        support: Sent positions, uint32[k], valid until the thread's next encoding; None for all.
        last_waited: The handle that was waited for last.
        sketch: The handle of all ranks' sketches, if the memory has some.
        squares: What the memory wants to know of the result; see Memory.square_sums.
        containers: All ranks' containers between `receive` and `decode`.
        lender: See Bucket.lender; None where `finish` decodes.
    """

    handle: CollectiveHandle
    wire_bytes: int
    seconds: dict[str, float]
    index_codecs: list[str] = dataclasses.field(default_factory=list, kw_only=True)
    gradient_bytes: int | None = dataclasses.field(default=None, kw_only=True)
    received: int | None = dataclasses.field(default=None, kw_only=True)
    container: np.ndarray | None = dataclasses.field(default=None, kw_only=True)
    support: Any = dataclasses.field(default=None, kw_only=True)
    last_waited: CollectiveHandle | None = dataclasses.field(default=None, kw_only=True, repr=False)
    sketch: CollectiveHandle | None = dataclasses.field(default=None, kw_only=True, repr=False)
    squares: SquareSums | None = dataclasses.field(default=None, kw_only=True, repr=False)
    containers: list[Container] = dataclasses.field(default_factory=list, kw_only=True, repr=False)
    lender: Any = dataclasses.field(default=None, kw_only=True, repr=False)
    bypasses = False  #: Whether the gradients bypass the exchange, so that nothing is left to decode.
    keeps_state = False  #: Whether the buffer for the next residual is read or written once the exchange has started.

    def has_arrived(self) -> bool | None:
        """Return whether nothing is left to wait for. A handle that was waited for is not polled.

        Returns:
            True or False, or None if that is not known.
        """
        arrived = self.handle is self.last_waited or self.handle.poll()
        return arrived if self.sketch is None or not arrived else self.sketch.poll()

    def is_on_its_way(self) -> bool:
        """Return whether a collective is known to be under way: started, and not over yet.

        Returns:
            True only if that is known.
        """
        return self.has_arrived() is False

    @property
    def codec_seconds(self) -> float:
        """Seconds of all stages but waiting."""
        return sum(taken for stage, taken in self.seconds.items() if stage != "exchange")

    def add_seconds(self, seconds: dict[str, float]) -> None:
        """Count the seconds of some stages.

        Args:
            seconds: Seconds by stage.
        """
        for stage, taken in seconds.items():
            self.seconds[stage] = self.seconds.get(stage, 0.0) + taken


#: The kind of Pending with which a communicator keeps what it has to know of an exchange under way.
PendingType = TypeVar("PendingType", bound=Pending)


class BucketMemory(Protocol):
    """What a communicator asks about the memory of its bucket, a grace_ext.memory.base.Memory."""

    name: str
    has_hooks: bool
    hooks_work_dense: bool


class Communicator(Stage, Generic[PendingType]):
    """How one bucket is exchanged and reduced. All ranks end up with the same bits."""

    kind = "communicator"
    #: The transport's collectives that a bucket takes, each needing the result of the one before. Adapters whose
    #: collectives are nodes of a graph have to know them before the first step.
    collectives: tuple[str, ...] = ("allgather",)
    sends_containers = False  #: Whether what a rank sends is its container.
    #: Whether `Pending.support` tells, as soon as an exchange has started, what is sent of the whole gradient.
    reports_support = True
    needs_reducible = False  #: Whether it needs a compressor whose values can be summed as they are (its `reducible_dtype`).
    votes = False  #: Whether the result is a vote on signs, and not a sum.
    divides_by_senders = False  #: Whether each element is the mean over the ranks that have sent it.
    #: Whether it hands over what each rank has sent, and no sum; then float32, too, goes by it.
    needs_each_rank = False
    #: Only then: the containers of the last step, in the order of ranks, without those that have sent none.
    received: list[Container]
    needs_memory = True  #: Whether the next step needs what the memory remembers.
    preserves_input = False  #: Whether `start` leaves the gradient as it is.
    decodes_later = False  #: Whether `receive` and `decode` can be called one after the other in the place of `finish`.
    writes_parts = False  #: Whether `finish` can write to several vectors: see Bucket.writes_parts.
    switches = False  #: Whether it changes between compressed and dense steps; `strategy` tells which one is in use.
    #: Whether it sends what it is given as it is, for now, and not what the bucket's compressor makes of it.
    sends_whole = False
    is_tuned = False  #: Whether it switches when it is told to, because of what was measured.
    strategy: str  #: The one in use, only where it switches.
    #: "float32" or "fp16" while gradients may bypass the exchange: see Exchange.bypass_dtype.
    bypass_dtype: str | None = None

    def check(self, compressor: Compressor) -> None:
        """Check that this communicator can carry what a compressor makes.

        Args:
            compressor: The bucket's compressor.

        Raises:
            ConfigError: It cannot.
        """
        if compressor.lowrank is not None:
            raise ConfigError(
                f"communicator {self.name!r} cannot carry {str(compressor)!r}: factors have their own, which Exchange.bucket chooses"
            )
        if self.needs_reducible and compressor.reducible_dtype is None:
            raise ConfigError(
                f"communicator {self.name!r} sums values as they are and cannot carry {str(compressor)!r}: "
                f"use allgather, or a spec with dense or randomk and raw or fp16 values"
            )

    def for_bucket(
        self, compressor: Compressor, memory: BucketMemory, transport: Transport, factors: "Communicator | None"
    ) -> "Communicator":
        """Return the communicator of one bucket: this one, except for factors.

        Args:
            compressor: The bucket's compressor.
            memory: The bucket's memory.
            transport: The transport of the exchange.
            factors: The communicator that carries the factors of a low-rank compressor; None with another compressor.

        Returns:
            The communicator.

        Raises:
            ConfigError: The parts do not fit together.
        """
        return factors or self

    def collectives_of(self, transport: Transport) -> tuple[str, ...]:
        """Return the collectives that a bucket takes, which can depend on the number of ranks and on their hosts.

        Args:
            transport: The transport of the exchange.

        Returns:
            The names of the transport's methods, in the order of the calls.
        """
        return self.collectives

    def wire_copies(self, transport: Transport) -> float:
        """Return how many times what a rank gives to collectives (`Pending.wire_bytes`) leaves it, on average.

        Bytes go to all other ranks in an allgather, and along a ring in an allreduce. What is sharded goes to n - 1 ranks,
        each getting a part of 1 / n, and the rest goes to one rank, which amounts to the same as a ring.

        Args:
            transport: The transport of the exchange.

        Returns:
            The factor.
        """
        ranks = transport.size
        return ranks - 1 if self.collectives_of(transport) == ("allgather",) else 2 * (ranks - 1) / ranks

    def takes_parts(self, compressor: Compressor) -> bool:
        """Say whether `start` with a state takes the gradient as vectors float32 that together have d elements, too.

        Args:
            compressor: The bucket's compressor.

        Returns:
            Whether it does, in the step that begins.
        """
        return False

    def allreduce_dtype(self, compressor: Compressor) -> str:
        """Return the dtype of what goes into the allreduces of a bucket.

        Args:
            compressor: The bucket's compressor.

        Returns:
            "float32" or "float16".
        """
        return compressor.reducible_dtype or "float32"

    def start(
        self,
        transport: Transport,
        name: str,
        compressor: Compressor,
        gradient: Any,
        state: tuple[np.ndarray, np.ndarray] | None,
        stream: Stream,
        sizes: tuple[int, ...] | None = None,
    ) -> PendingType:
        """Encode a gradient and start its exchange.

        Args:
            transport: The transport of the exchange.
            name: Name of the bucket, the same on all ranks; names of collectives begin with it.
            compressor: The bucket's compressor.
            gradient: float32[d], or parts of it if it `takes_parts`. It may be the memory's buffer for the next residual, and
                may be overwritten unless the communicator has `preserves_input`.
            state: What `Memory.begin` returned: (residual, buffer for the next one), both float32[d], or None.
            stream: The random numbers of this gradient on this rank.
            sizes: Numbers of elements of the tensors that the gradient consists of; None for a single tensor.

        Returns:
            The exchange under way.
        """
        raise NotImplementedError

    def start_empty(
        self,
        transport: Transport,
        name: str,
        compressor: Compressor,
        size: int,
        stream: Stream,
        sizes: tuple[int, ...] | None = None,
    ) -> PendingType:
        """Take part in an exchange without a gradient, as a rank does that has joined the others.

        Args:
            transport: The transport of the exchange.
            name: Name of the bucket.
            compressor: The bucket's compressor.
            size: Number of elements of the bucket.
            stream: The random numbers of this gradient on this rank.
            sizes: Numbers of elements of the tensors in the bucket; None for a single tensor.

        Returns:
            The exchange under way.
        """
        return self.start(transport, name, compressor, self._zeros(size), None, stream, sizes)

    def _zeros(self, size: int) -> Any:
        """Make zeros where gradients lie, float32[size]."""
        return np.zeros(size, np.float32)

    def memory_replaced(self) -> None:
        """Note, between steps and on all ranks, that the bucket's memory was replaced, as by that of a checkpoint."""

    def advance(self, pending: PendingType, transport: Transport) -> None:
        """Wait for one collective and start the next one that needs its result. `finish` does whatever is left.

        Args:
            pending: The exchange under way.
            transport: The transport of the exchange.
        """

    def finish(self, pending: PendingType, transport: Transport, out: Any, weight: float) -> bool:
        """Wait for the exchange, and write weight * (sum over ranks).

        Args:
            pending: The exchange under way.
            transport: The transport of the exchange.
            out: Output, float32[d]; or vectors that together have d elements, if it `writes_parts`.
            weight: Factor of the sum.

        Returns:
            False if some rank's gradient was not finite.

        Raises:
            ContainerError: What came is not the containers of all ranks.
            ExchangeError: The collective failed, or another rank could not read what it got.
        """
        raise NotImplementedError

    def receive(self, pending: PendingType, transport: Transport, size: int) -> bool:
        """Wait for the exchange, and check what has come. Only if it `decodes_later`.

        Args:
            pending: The exchange under way.
            transport: The transport of the exchange.
            size: Number of elements of the bucket.

        Returns:
            See `finish`, whose errors it raises.
        """
        raise NotImplementedError

    def decode(self, pending: PendingType, out: np.ndarray, weight: float) -> None:
        """Write weight * (sum over ranks) of what `receive` has received.

        Args:
            pending: The exchange.
            out: Output, float32[d].
            weight: Factor of the sum.
        """
        raise NotImplementedError


def wait(pending: Pending) -> np.ndarray:
    """Wait for the collective under way. The time is counted as that of the stage "exchange".

    Args:
        pending: The exchange under way.

    Returns:
        The collective's result.
    """
    handle = pending.handle
    result = wait_for(pending, handle)
    pending.last_waited = handle
    return result


def wait_for(pending: Pending, handle: CollectiveHandle) -> np.ndarray:
    """Wait for a collective of an exchange, and count its time and padding.

    Args:
        pending: The exchange under way.
        handle: The collective's handle.

    Returns:
        The collective's result.
    """
    started = time.perf_counter()
    result = handle.wait()
    pending.wire_bytes += handle.padding
    pending.add_seconds({"exchange": time.perf_counter() - started + handle.waited_seconds})
    return result
