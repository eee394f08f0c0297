"""How many ranks have gradients in a step, where the lengths of containers do not tell: for ranks that leave early."""

import concurrent.futures
from collections.abc import Sequence

import numpy as np

from ..communicators.base import Pending
from ..transport.base import Transport
from .buckets import Bucket
from .scheduler import Scheduler


class GradientCount:
    """Counts by an allreduce of one float32 per step, which the worker thread starts before the first bucket.

    Args:
        scheduler: The exchange's scheduler; it keeps the order of collectives the same on all ranks.
        transport: The exchange's transport.
    """

    def __init__(self, scheduler: Scheduler, transport: Transport):
        self._scheduler, self._transport = scheduler, transport
        self._counting: concurrent.futures.Future | None = None

    @staticmethod
    def is_needed(buckets: Sequence[Bucket]) -> bool:
        """Say whether nothing else tells how many ranks have gradients in this step: those without send empty containers.

        Args:
            buckets: All buckets.

        Returns:
            The answer, the same on all ranks.
        """
        return not any(bucket.communicator.sends_containers for bucket in buckets)

    def start(self, name: str, has_gradients: bool) -> None:
        """Start to count.

        Args:
            name: Name of the collective, the same on all ranks.
            has_gradients: Whether this rank has gradients in this step.
        """
        self._counting = self._scheduler.run_collective(self._count, name, has_gradients)

    def _count(self, name: str, has_gradients: bool) -> Pending:
        return Pending(self._transport.allreduce(name, np.full(1, has_gradients, np.float32)), 4, {})

    def take(self) -> int | None:
        """Wait for the count, once in a step.

        Returns:
            The number of ranks with gradients; None if they are not counted in this step, or were taken before.
        """
        counting, self._counting = self._counting, None
        return None if counting is None else int(counting.result().handle.wait()[0])

    def forget(self) -> None:
        """Forget a count that nobody will wait for."""
        self._counting = None
