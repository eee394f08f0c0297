"""The interface of transports."""

import time
from collections.abc import Callable
from typing import Any

import numpy as np


class CollectiveHandle:
    """A collective under way.

    Args:
        wait: wait() blocks until the result is there, and returns it.
        poll: poll() tells whether the result is there, or returns None if that is not known now. Only for libraries in which
            ranks may wait for collectives and start them in any order.
        padding: Bytes that this rank sends on top of the payload.
    """

    #: Seconds that were spent waiting for the collective before `wait` was called.
    waited_seconds = 0.0

    def __init__(self, wait: Callable[[], np.ndarray], poll: Callable[[], bool | None] | None = None, padding: int = 0):
        self._wait, self._poll, self.padding = wait, poll, padding
        self._ended: Callable | None = None

    @classmethod
    def finished(cls, result: np.ndarray) -> "CollectiveHandle":
        """Make the handle of a collective that is over.

        Args:
            result: Its result.

        Returns:
            The handle.
        """
        return cls(lambda: result, lambda: True)

    def poll(self) -> bool | None:
        """Return whether the result is there.

        Returns:
            True or False; None if the library does not tell, or this rank has not sent its part yet.
        """
        there = self._poll() if self._poll else None
        if there:
            self._tell(late=True)
        return there

    def wait(self) -> np.ndarray:
        """Wait for the result.

        Returns:
            The result, as the transport's method describes it.
        """
        late = bool(self._ended and self._poll and self._poll())
        result = self._wait()
        self._tell(late)
        return result

    def on_end(self, call: Callable[[float, bool], None]) -> "CollectiveHandle":
        """Have a function called once, in the thread that notices the end of the collective.

        Args:
            call: call(seconds, late): the time of the end, in seconds of time.perf_counter, and whether that is only the
                latest time at which it can have been.

        Returns:
            This handle.
        """
        self._ended = call
        return self

    def _tell(self, late: bool) -> None:
        ended, self._ended = self._ended, None
        if ended is not None:
            ended(time.perf_counter(), late)


class Transport:
    """The few collectives that communicators are made of. An adapter wraps its library in one.

    Calls return at once, with a CollectiveHandle. A name identifies a collective: all ranks must start it, in any order unless the
    transport is `in_order`.
    Failures raise ExchangeError or the library's own error.
    """

    rank: int
    size: int
    #: This rank's number in the whole job, for messages. Adapters' transports have it.
    world_rank: int
    #: The number of each rank's host; hosts are numbered in the order of their first ranks. None until the ranks have told
    #: each other, in Exchange.check_config_digests.
    hosts: tuple[int, ...] | None = None
    #: Whether the collectives of several buckets may be fused into one.
    can_fuse = True
    #: Whether collectives are paired by their order, whatever their names: then all ranks start them in the same order.
    in_order = False
    #: The accelerator that messages lie on, for adapters whose gradients are there. `allreduce` and `alltoall` then take arrays of it,
    #: too, and give their result there. None for the host.
    message_device: Any = None

    def allgather(self, name: str, payload: np.ndarray) -> CollectiveHandle:
        """Send a payload to all ranks.

        Args:
            name: Name of the collective.
            payload: uint8[m]; m may differ between ranks.

        Returns:
            A handle of uint8[n], the payloads joined in the order of ranks.
        """
        raise NotImplementedError

    def allreduce(self, name: str, array: np.ndarray) -> CollectiveHandle:
        """Sum an array over ranks.

        Args:
            name: Name of the collective.
            array: float32[n] or float16[n], the same n on all ranks; it may be overwritten.

        Returns:
            A handle of the sum, with the same dtype.
        """
        raise NotImplementedError

    def alltoall(self, name: str, payload: np.ndarray, splits: list[int]) -> CollectiveHandle:
        """Send each rank a part of a payload.

        Args:
            name: Name of the collective.
            payload: uint8[m], the parts for the ranks in their order.
            splits: Bytes of each part.

        Returns:
            A handle of uint8[n], the ranks' parts for this rank, joined in the order of ranks.
        """
        raise NotImplementedError

    def broadcast(self, name: str, payload: np.ndarray, root: int) -> CollectiveHandle:
        """Send one rank's payload to all ranks.

        Args:
            name: Name of the collective.
            payload: uint8[m]; empty on all ranks but the root.
            root: The rank whose payload is sent.

        Returns:
            A handle of the root's payload, on all ranks.
        """
        return self.allgather(name, payload)

    def forget_lengths(self) -> None:
        """Discard what is remembered of payloads, because names refer to other buckets now. Call it on all ranks in the same step."""

    def probe_transport(self) -> "Transport | None":
        """Return a transport to measure the link with.

        Returns:
            A transport that can start collectives and wait for them at any time between steps; None if there is none.
        """
        return None


class TransportWrapper(Transport):
    """Forwards everything to another transport. Every collective goes through `start_collective`, which subclasses override.

    Args:
        transport: The transport to wrap.
    """

    def __init__(self, transport: Transport):
        self._transport = transport
        self.rank, self.size, self.can_fuse = transport.rank, transport.size, transport.can_fuse
        self.message_device, self.in_order = transport.message_device, transport.in_order

    def __getattr__(self, name: str) -> Any:
        """Forward what adapters' transports have beside collectives."""
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._transport, name)

    @property
    def hosts(self) -> tuple[int, ...] | None:
        """As of the wrapped transport."""
        return self._transport.hosts

    @hosts.setter
    def hosts(self, hosts: tuple[int, ...] | None) -> None:
        """Set them on the wrapped transport."""
        self._transport.hosts = hosts

    def forget_lengths(self) -> None:
        self._transport.forget_lengths()

    def probe_transport(self) -> Transport | None:
        return self._transport.probe_transport()

    def allgather(self, name: str, payload: np.ndarray) -> CollectiveHandle:
        return self.start_collective("allgather", name, payload)

    def allreduce(self, name: str, array: np.ndarray) -> CollectiveHandle:
        return self.start_collective("allreduce", name, array)

    def alltoall(self, name: str, payload: np.ndarray, splits: list[int]) -> CollectiveHandle:
        return self.start_collective("alltoall", name, payload, splits)

    def broadcast(self, name: str, payload: np.ndarray, root: int) -> CollectiveHandle:
        return self.start_collective("broadcast", name, payload, root)

    def start_collective(self, kind: str, name: str, array: np.ndarray, *args: Any) -> CollectiveHandle:
        """Start a collective of the wrapped transport.

        Args:
            kind: Name of the transport's method.
            name: Name of the collective.
            array: The payload or array that is sent.
            *args: The method's further arguments.

        Returns:
            The handle.
        """
        return getattr(self._transport, kind)(name, array, *args)
