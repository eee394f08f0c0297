"""What the communicators have in common that hand each step of a bucket to one of several others."""

from typing import Any

import numpy as np

from .._util.rng import Stream
from ..pipeline.compressor import Compressor
from ..transport.base import Transport
from .base import Communicator, Pending
from .places import Movable


class Alternating(Movable, Communicator[Any]):
    """Hands each step to the communicator that is its turn. The turn changes only between steps, on all ranks."""

    switches = True

    @property
    def _inner(self) -> Communicator:
        """The communicator of this step."""
        raise NotImplementedError

    def _all(self) -> list[Communicator]:
        """The communicators of all steps."""
        raise NotImplementedError

    def _compressor(self, compressor: Compressor) -> Compressor:
        """What this step compresses with. compressor: the bucket's."""
        raise NotImplementedError

    @property
    def sends_containers(self) -> bool:  # type: ignore[override]
        """As in this step."""
        return self._inner.sends_containers

    @property
    def reports_support(self) -> bool:  # type: ignore[override]
        """As in this step."""
        return self._inner.reports_support

    @property
    def preserves_input(self) -> bool:  # type: ignore[override]
        """As in this step."""
        return self._inner.preserves_input

    @property
    def decodes_later(self) -> bool:  # type: ignore[override]
        """As in this step."""
        return self._inner.decodes_later

    @property
    def writes_parts(self) -> bool:  # type: ignore[override]
        """As in this step."""
        return self._inner.writes_parts

    def collectives_of(self, transport: Transport) -> tuple[str, ...]:
        return self._inner.collectives_of(transport)

    def max_collectives(self, transport: Transport) -> int:
        """Return the largest number of collectives that a step takes.

        Args:
            transport: The transport of the exchange.

        Returns:
            The number.
        """
        return max(len(one.collectives_of(transport)) for one in self._all())

    def takes_parts(self, compressor: Compressor) -> bool:
        return self._inner.takes_parts(self._compressor(compressor))

    def wire_copies(self, transport: Transport) -> float:
        return self._inner.wire_copies(transport)

    def start(
        self,
        transport: Transport,
        name: str,
        compressor: Compressor,
        gradient: Any,
        state: tuple[np.ndarray, np.ndarray] | None,
        stream: Stream,
        sizes: tuple[int, ...] | None = None,
    ) -> Pending:
        return self._inner.start(transport, name, self._compressor(compressor), gradient, state, stream, sizes)

    def start_empty(
        self,
        transport: Transport,
        name: str,
        compressor: Compressor,
        size: int,
        stream: Stream,
        sizes: tuple[int, ...] | None = None,
    ) -> Pending:
        return self._inner.start_empty(transport, name, self._compressor(compressor), size, stream, sizes)

    def advance(self, pending: Pending, transport: Transport) -> None:
        self._inner.advance(pending, transport)

    def finish(self, pending: Pending, transport: Transport, out: Any, weight: float) -> bool:
        return self._inner.finish(pending, transport, out, weight)

    def receive(self, pending: Pending, transport: Transport, size: int) -> bool:
        return self._inner.receive(pending, transport, size)

    def decode(self, pending: Pending, out: np.ndarray, weight: float) -> None:
        self._inner.decode(pending, out, weight)
