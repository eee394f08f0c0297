"""A transport between threads of one process, for tests and simulation."""

import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ..errors import ExchangeError
from .base import CollectiveHandle, Transport


class InProcessGroup:
    """The ranks of an in-process transport. Each thread is a rank, and uses `transport(rank)`.

    Args:
        size: Number of ranks.
        timeout: Seconds that a collective waits for all ranks to join.
        hosts: The number of the host that each rank counts as being on, from 0; see Transport.hosts. None: all on one host.
    """

    def __init__(self, size: int, timeout: float = 60.0, hosts: Sequence[int] | None = None):
        self.size = size
        self.hosts = tuple(hosts or (0,) * size)
        self.timeout = timeout
        self._changed = threading.Condition()
        self._open: dict[str, list[dict]] = {}

    def transport(self, rank: int) -> "InProcessTransport":
        """Make the transport of one rank.

        Args:
            rank: The rank.

        Returns:
            The transport.
        """
        return InProcessTransport(self, rank)

    def join(self, name: str, rank: int, given: Any) -> dict:
        """Join a collective.

        Args:
            name: Name of the collective.
            rank: The rank that joins.
            given: What it contributes.

        Returns:
            rank -> contribution; the dict is filled as more ranks join.
        """
        with self._changed:
            rounds = self._open.setdefault(name, [])
            parts = next((parts for parts in rounds if rank not in parts), None)
            if parts is None:
                parts = {}
                rounds.append(parts)
            parts[rank] = given
            if len(parts) == self.size:
                rounds.remove(parts)
                self._changed.notify_all()
        return parts

    def wait(self, name: str, parts: dict) -> list:
        """Wait until all ranks have joined a collective.

        Args:
            name: Name of the collective.
            parts: What `join` returned.

        Returns:
            The ranks' contributions, in their order.

        Raises:
            ExchangeError: Some ranks did not join within the timeout.
        """
        with self._changed:
            if not self._changed.wait_for(lambda: len(parts) == self.size, self.timeout):
                missing = sorted(set(range(self.size)) - set(parts))
                raise ExchangeError(f"{name!r}: ranks {missing} did not join within {self.timeout} s")
        return [parts[rank] for rank in range(self.size)]


class InProcessTransport(Transport):
    """The transport of one rank of an InProcessGroup.

    Args:
        group: The group.
        rank: The rank.
    """

    def __init__(self, group: InProcessGroup, rank: int):
        self._group = group
        self.rank = self.world_rank = rank
        self.size = group.size
        self.hosts = group.hosts

    def allgather(self, name: str, payload: np.ndarray) -> CollectiveHandle:
        return self._start(name, payload.copy(), np.concatenate)

    def allreduce(self, name: str, array: np.ndarray) -> CollectiveHandle:
        return self._start(name, array.copy(), _sum_in_rank_order)

    def alltoall(self, name: str, payload: np.ndarray, splits: list[int]) -> CollectiveHandle:
        parts = np.split(payload.copy(), np.cumsum(splits)[:-1])
        return self._start(name, parts, lambda rows: np.concatenate([row[self.rank] for row in rows]))

    def _start(self, name: str, given: Any, combine: Callable) -> CollectiveHandle:
        """Start a collective. combine: computes the result from the contributions, in the order of ranks."""
        parts = self._group.join(name, self.rank, given)
        return CollectiveHandle(lambda: combine(self._group.wait(name, parts)), lambda: len(parts) == self.size)


def _sum_in_rank_order(arrays: list[np.ndarray]) -> np.ndarray:
    total = arrays[0].copy()
    for array in arrays[1:]:
        total += array
    return total
