"""A transport between threads of one process, for tests and simulation."""

import threading

import numpy as np

from ..errors import ExchangeError
from .base import Transport


class InProcessGroup:
    """`group.transport(rank)` is for one thread each. A collective that not all ranks join within `timeout` seconds
    raises ExchangeError in those that wait."""

    def __init__(self, size: int, timeout: float = 60.0, hosts=None):
        """hosts: that each rank counts as being on, numbered from 0; see Transport.hosts. None: all on one."""
        self.size = size
        self.hosts = tuple(hosts or (0,) * size)
        self.timeout = timeout
        self._changed = threading.Condition()
        self._open: dict[str, list[dict]] = {}

    def transport(self, rank: int) -> "InProcessTransport":
        return InProcessTransport(self, rank)

    def _join(self, name: str, rank: int, given) -> dict:
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

    def _wait(self, name: str, parts: dict) -> list:
        with self._changed:
            if not self._changed.wait_for(lambda: len(parts) == self.size, self.timeout):
                missing = sorted(set(range(self.size)) - set(parts))
                raise ExchangeError(f"{name!r}: ranks {missing} did not join within {self.timeout} s")
        return [parts[rank] for rank in range(self.size)]


class InProcessTransport(Transport):
    def __init__(self, group: InProcessGroup, rank: int):
        self._group = group
        self.rank = self.world_rank = rank
        self.size = group.size
        self.hosts = group.hosts

    def allgather(self, name, payload):
        return _Handle(self._group, name, self._group._join(name, self.rank, payload.copy()), np.concatenate)

    def allreduce(self, name, array):
        return _Handle(self._group, name, self._group._join(name, self.rank, array.copy()), _sum_in_rank_order)

    def alltoall(self, name, payload, splits):
        parts = np.split(payload.copy(), np.cumsum(splits)[:-1])
        return _Handle(self._group, name, self._group._join(name, self.rank, parts),
                       lambda rows: np.concatenate([row[self.rank] for row in rows]))


class _Handle:
    def __init__(self, group, name, parts, combine):
        self._group, self._name, self._parts, self._combine = group, name, parts, combine

    def poll(self):
        return len(self._parts) == self._group.size

    def wait(self):
        return self._combine(self._group._wait(self._name, self._parts))


def _sum_in_rank_order(arrays: list[np.ndarray]) -> np.ndarray:
    total = arrays[0].copy()
    for array in arrays[1:]:
        total += array
    return total
