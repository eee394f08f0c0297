"""What each rank has sent, for those that take another mean than the sum."""

import numpy as np

from ..errors import ConfigError
from ..pipeline.compressor import Compressor
from ..pipeline.container import Container
from ..transport.base import Transport
from .allgather import Allgather
from .base import BucketMemory, Communicator, Pending


class Separate(Allgather):
    """Gathers the containers of all ranks, like `allgather`, and leaves their sum to nobody: `received` has each rank's own.

    A container that is not finite does not end the step: whoever reads `received` leaves that rank out. No spec names it; the
    rounds of local steps use it for their robust means.
    """

    name = "separate"
    decodes_later = writes_parts = False
    needs_each_rank = True

    def __init__(self) -> None:
        self.received: list[Container] = []

    def for_bucket(
        self, compressor: Compressor, memory: BucketMemory, transport: Transport, factors: Communicator | None
    ) -> Communicator:
        if factors is not None:
            raise ConfigError(
                f"{str(compressor)!r}: low-rank factors can only be summed; allowed: specs that make containers"
            )
        return Separate()

    def finish(self, pending: Pending, transport: Transport, out: np.ndarray, weight: float) -> bool:
        """Wait for the containers, and write zeros.

        Args:
            pending: The exchange under way.
            transport: The transport of the exchange.
            out: Output, float32[d].
            weight: Not used.

        Returns:
            True.

        Raises:
            ContainerError: What came is not the containers of all ranks.
        """
        self.receive(pending, transport, out.size)
        self.received, pending.containers = pending.containers, []
        out[:] = 0
        return True
