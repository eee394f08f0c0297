"""Steps over a library that pairs collectives by their order, not by name (`Transport.in_order`)."""

import time
from collections.abc import Sequence

import numpy as np

from ..errors import ExchangeError
from ..transport.base import CollectiveHandle, Transport
from .buckets import Bucket
from .scheduler import Scheduler


class CollectiveOrder:
    """Keeps the order in which a step's collectives start the same on all ranks; over other libraries there is nothing to keep.

    Args:
        scheduler: The exchange's scheduler.
        transport: The exchange's transport.
    """

    def __init__(self, scheduler: Scheduler, transport: Transport):
        self._scheduler, self._matters = scheduler, transport.in_order
        self._lost = False

    def check(self) -> None:
        """Look before a step whether this rank still is where the others are.

        Raises:
            ExchangeError: A step was given up after it had begun.
        """
        if self._lost:
            raise ExchangeError(
                "a step was given up after it had begun, and over this library collectives are paired by their order: nothing can "
                "be exchanged any more; end the job, and go on from a checkpoint"
            )

    def give_up_step(self) -> None:
        """A step ends here, maybe after it had begun: nobody knows then which of its collectives the other ranks have started."""
        self._lost |= self._matters and not self._scheduler.is_idle

    def before_waiting(self, buckets: Sequence[Bucket], joinable: bool) -> None:
        """Send all started buckets before one is waited for, since that may start another collective.

        Args:
            buckets: All buckets.
            joinable: Whether ranks that have left may shadow the step, which they begin with `receive_first`.
        """
        if not self._matters:
            return
        for bucket in buckets:
            if self._scheduler.is_started(bucket):
                self._scheduler.pending(bucket)
        if joinable:
            self.receive_first(buckets)

    def receive_first(self, buckets: Sequence[Bucket]) -> np.ndarray:
        """Wait for the containers of the first bucket that sends some in this step.

        Args:
            buckets: All buckets.

        Returns:
            uint8[n], those of all ranks, joined. `Exchange.finish` decodes them later.
        """
        self.before_waiting(buckets, joinable=False)
        first = next(bucket for bucket in buckets if bucket.communicator.sends_containers)
        pending, began = self._scheduler.pending(first), time.perf_counter()
        received = pending.handle.wait()
        finished = CollectiveHandle.finished(received)
        finished.padding, finished.waited_seconds = pending.handle.padding, time.perf_counter() - began
        pending.handle = finished
        return received
