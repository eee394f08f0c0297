"""Steps in which a memory needs exact sums, between those that are compressed."""

from typing import Any, Protocol

import numpy as np

from .._util.rng import Stream
from ..pipeline.compressor import Compressor, make_compressor
from ..transport.base import Transport
from .allreduce import Allreduce
from .base import Communicator, Pending


class ExactStepsMemory(Protocol):
    """What is asked about the bucket's memory, a grace_ext.memory.base.Memory."""

    def sends_exactly(self, name: str) -> bool:
        """Say whether a bucket is sent exactly in the step that begins. The answer stays the same during the step.

        Args:
            name: Name of the bucket.

        Returns:
            The same on all ranks.
        """
        raise NotImplementedError

    def forget_arrivals(self) -> None:
        """See grace_ext.memory.base.Memory."""


class ExactSteps(Communicator[Any]):
    """Exchanges one bucket by a communicator, or in float32 by the library's own allreduce where the memory wants it exact.

    In exact steps the memory's residual takes no part, and stays as it is.

    Args:
        compressed: The communicator of all other steps.
        memory: The bucket's memory.
        bucket: Name of the bucket.
    """

    switches = True

    def __init__(self, compressed: Communicator, memory: ExactStepsMemory, bucket: str):
        self._compressed, self._memory, self._bucket = compressed, memory, bucket
        self._allreduce, self._exact = Allreduce(), make_compressor("dense/raw")
        #: That of the compressed steps.
        self.name = compressed.name

    @property
    def is_exact(self) -> bool:
        """Whether the step is an exact one."""
        return self._memory.sends_exactly(self._bucket)

    @property
    def strategy(self) -> str:  # type: ignore[override]
        """How the bucket goes in this step: "float32", or the name of the communicator."""
        return "float32" if self.is_exact else self.name

    @property
    def _inner(self) -> Communicator:
        return self._allreduce if self.is_exact else self._compressed

    @property
    def sends_containers(self) -> bool:  # type: ignore[override]
        """As in this step."""
        return self._inner.sends_containers

    @property
    def reports_support(self) -> bool:  # type: ignore[override]
        """As in compressed steps."""
        return self._compressed.reports_support

    @property
    def preserves_input(self) -> bool:  # type: ignore[override]
        """As in this step."""
        return self._inner.preserves_input

    @property
    def needs_memory(self) -> bool:  # type: ignore[override]
        """Whether the residual takes part in this step."""
        return not self.is_exact

    def check(self, compressor: Compressor) -> None:
        self._compressed.check(compressor)

    def collectives_of(self, transport: Transport) -> tuple[str, ...]:
        return self._inner.collectives_of(transport)

    def max_collectives(self, transport: Transport) -> int:
        """Return the largest number of collectives that a step takes.

        Args:
            transport: The transport of the exchange.

        Returns:
            The number.
        """
        return max(len(one.collectives_of(transport)) for one in (self._compressed, self._allreduce))

    def wire_copies(self, transport: Transport) -> float:
        return self._inner.wire_copies(transport)

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
        if self.is_exact:
            return self._allreduce.start(transport, name, self._exact, gradient, state, stream, sizes)
        return self._compressed.start(transport, name, compressor, gradient, state, stream, sizes)

    def advance(self, pending: Pending, transport: Transport) -> None:
        self._inner.advance(pending, transport)

    def finish(self, pending: Pending, transport: Transport, out: np.ndarray, weight: float) -> bool:
        return self._inner.finish(pending, transport, out, weight)

    def memory_replaced(self) -> None:
        self._memory.forget_arrivals()
        self._compressed.memory_replaced()
