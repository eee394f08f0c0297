"""What a transport promises."""

import numpy as np


class Transport:
    """The few collectives that communicators are made of. An adapter wraps its library in one.

    Calls return at once with a handle; `handle.wait()` blocks for the result (`handle.waited`, if there is one: the seconds
    that were spent waiting before; `handle.padding`: the bytes that this rank sent on top of the payload; `handle.poll()`:
    whether the result is there, for libraries in which ranks may wait and start collectives in any order). A name identifies
    a collective: all ranks must start it, in any order. Failures raise ExchangeError or the library's own error.
    """

    rank: int
    size: int
    #: This rank's number in the whole job, by which messages name it. Adapters' transports have it.
    world_rank: int
    #: Of each rank the number of its host; hosts are numbered in the order of their first ranks. None before the ranks have
    #: told each other, in Exchange.check_layouts.
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

    def between_steps(self) -> "Transport | None":
        """What can start collectives, and wait for them, at any time between steps, so that the link can be measured; None
        if nothing can."""
        return None


def has_arrived(handle) -> bool | None:
    """Whether the result of a collective is there; None if the library does not tell, or it waits for others of this rank to
    go with."""
    poll = getattr(handle, "poll", None)
    return poll() if poll else None
