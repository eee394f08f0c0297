"""What a transport promises."""

import time
from collections.abc import Callable

import numpy as np


class CollectiveHandle:
    """A collective under way.

    Args:
        wait: wait() blocks for the result.
        poll: poll() tells whether the result is there, or None if that is not known now; for libraries in which ranks may
            wait and start collectives in any order.
        padding: the bytes that this rank sends on top of the payload.
    """

    #: Seconds that were spent waiting before `wait` was called.
    waited_seconds = 0.0

    def __init__(self, wait: Callable[[], np.ndarray], poll: Callable[[], bool | None] | None = None, padding: int = 0):
        self._wait, self._poll, self.padding = wait, poll, padding
        self._ended: Callable | None = None

    @classmethod
    def finished(cls, result: np.ndarray) -> "CollectiveHandle":
        """Of a collective that is over."""
        return cls(lambda: result, lambda: True)

    def poll(self) -> bool | None:
        """Whether the result is there; None if the library does not tell, or this rank has not sent its part yet."""
        there = self._poll() if self._poll else None
        if there:
            self._tell(late=True)
        return there

    def wait(self) -> np.ndarray:
        """The result."""
        late = bool(self._ended and self._poll and self._poll())
        result = self._wait()
        self._tell(late)
        return result

    def on_end(self, call: Callable[[float, bool], None]) -> "CollectiveHandle":
        """Have call(seconds of time.perf_counter, late) called once, in the thread that sees the end. late: whether that is
        only the latest time at which it can have been."""
        self._ended = call
        return self

    def _tell(self, late: bool) -> None:
        ended, self._ended = self._ended, None
        if ended is not None:
            ended(time.perf_counter(), late)


class Transport:
    """The few collectives that communicators are made of. An adapter wraps its library in one.

    Calls return at once with a CollectiveHandle. A name identifies a collective: all ranks must start it, in any order.
    Failures raise ExchangeError or the library's own error.
    """

    rank: int
    size: int
    #: This rank's number in the whole job, by which messages name it. Adapters' transports have it.
    world_rank: int
    #: Of each rank the number of its host; hosts are numbered in the order of their first ranks. None before the ranks have
    #: told each other, in Exchange.check_config_digests.
    hosts: tuple[int, ...] | None = None
    #: Whether a bucket's collective may start together with that of another.
    can_fuse = True

    def allgather(self, name: str, payload: np.ndarray):
        """payload: uint8[m], m may differ between ranks -> handle of uint8, the payloads joined in the order of ranks."""
        raise NotImplementedError

    def allreduce(self, name: str, array: np.ndarray):
        """array: float32[n] or float16[n], may be overwritten -> handle of the sum over ranks, same dtype."""
        raise NotImplementedError

    def alltoall(self, name: str, payload: np.ndarray, splits: list[int]):
        """payload: uint8[m], splits[r] bytes for each rank r one after the other -> handle of uint8, what the ranks had for
        this one, joined in the order of ranks."""
        raise NotImplementedError

    def broadcast(self, name: str, payload: np.ndarray, root: int):
        """payload: uint8[m], empty but on rank `root` -> handle of the root's, on all ranks."""
        return self.allgather(name, payload)

    def probe_transport(self) -> "Transport | None":
        """What can start collectives, and wait for them, at any time between steps, so that the link can be measured; None
        if nothing can."""
        return None


class TransportWrapper(Transport):
    """Forwards everything to another transport."""

    def __init__(self, transport: Transport):
        self._transport = transport
        self.rank, self.size, self.can_fuse = transport.rank, transport.size, transport.can_fuse

    def __getattr__(self, name: str):
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

    def probe_transport(self):
        return self._transport.probe_transport()

    def allgather(self, name, payload):
        return self._start("allgather", name, payload)

    def allreduce(self, name, array):
        return self._start("allreduce", name, array)

    def alltoall(self, name, payload, splits):
        return self._start("alltoall", name, payload, splits)

    def broadcast(self, name, payload, root):
        return self._start("broadcast", name, payload, root)

    def _start(self, kind: str, name: str, array: np.ndarray, *args) -> CollectiveHandle:
        """Every collective comes through here. kind: the name of its method."""
        return getattr(self._transport, kind)(name, array, *args)
