"""A transport that measures what its collectives give: bytes, and when they were under way."""

import threading
import time
from collections.abc import Callable

import numpy as np

from .base import Transport, has_arrived


class Metered(Transport):
    """Passes collectives on. add(sent, started, ended, late): called at the end of each, from the thread that saw it: bytes
    that left this rank, seconds of time.perf_counter, and whether it may have ended before anybody looked."""

    def __init__(self, transport: Transport, add: Callable):
        self._transport, self._add, self._lock = transport, add, threading.Lock()
        self.rank, self.size, self.can_fuse = transport.rank, transport.size, transport.can_fuse

    def __getattr__(self, name):
        """What adapters have beside collectives."""
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._transport, name)

    @property
    def hosts(self):
        return self._transport.hosts

    @hosts.setter
    def hosts(self, hosts):
        self._transport.hosts = hosts

    def between_steps(self):
        return self._transport.between_steps()

    def allgather(self, name, payload):
        return self._timed(payload.nbytes * (self.size - 1), lambda: self._transport.allgather(name, payload))

    def allreduce(self, name, array):
        return self._timed(2 * array.nbytes * (self.size - 1) / self.size, lambda: self._transport.allreduce(name, array))

    def alltoall(self, name, payload, splits):
        return self._timed(payload.nbytes - splits[self.rank], lambda: self._transport.alltoall(name, payload, splits))

    def broadcast(self, name, payload, root):
        return self._timed(payload.nbytes * (self.size - 1), lambda: self._transport.broadcast(name, payload, root))

    def _timed(self, sent: float, start: Callable) -> "_Handle":
        started = time.perf_counter()
        return _Handle(start(), lambda ended, late: self._ended(sent, started, ended, late))

    def _ended(self, *collective) -> None:
        with self._lock:
            self._add(*collective)


class _Handle:
    """What `ended` of the inner handle is told once: seconds, and whether that is only the latest that it can have been."""

    def __init__(self, handle, ended: Callable):
        self._handle, self._ended = handle, ended

    def __getattr__(self, name):
        """padding, waited, and what else the inner one has."""
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._handle, name)

    def poll(self) -> bool | None:
        there = has_arrived(self._handle)
        if there:
            self._tell(late=True)
        return there

    def wait(self) -> np.ndarray:
        late = bool(has_arrived(self._handle))
        result = self._handle.wait()
        self._tell(late)
        return result

    def _tell(self, late: bool) -> None:
        ended, self._ended = self._ended, None
        if ended is not None:
            ended(time.perf_counter(), late)
