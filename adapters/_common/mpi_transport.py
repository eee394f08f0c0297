"""The collectives of grace_ext over mpi4py."""

import functools
from collections.abc import Callable

import numpy as np
from mpi4py import MPI

from grace_ext import ConfigError, ExchangeError
from grace_ext._util.numerics import non_finite_allowed
from grace_ext.transport import CollectiveHandle
from grace_ext.transport.equal_lengths import EqualLengthTransport, head_of, lengths_in

from .waiting import wait_until

_DATA, _LEFT = 1, 2  # tags
_LOOK = 64  # polls between two looks for ranks that have left


def _add_halves(given: MPI.buffer, total: MPI.buffer, _: MPI.Datatype) -> None:
    total = np.frombuffer(total, np.float16)
    with non_finite_allowed():
        total += np.frombuffer(given, np.float16)


_SUM_OF_HALVES = MPI.Op.Create(_add_halves, commute=True)  # MPI has no float16


class MpiTransport(EqualLengthTransport):
    """The collectives of grace_ext over the ranks of an MPI communicator, without blocking inside MPI.

    MPI pairs collectives by their order, so one rank's are started one after the other, in the same order on all ranks.
    Whichever thread does so, only one is in MPI for this communicator at a time.

    A rank that ends tells the others how many collectives it has started (`leave`): who waits for one that it will never
    start raises an error instead of waiting for ever.

    Args:
        comm: The ranks. A duplicate of it is made, which is a collective, so that nobody else's messages meet these.

    Raises:
        ConfigError: MPI was initialized without support for threads.
    """

    def __init__(self, comm: MPI.Comm):
        super().__init__()
        if MPI.Query_thread() < MPI.THREAD_MULTIPLE:
            raise ConfigError(
                "MPI was initialized without support for several threads: let mpi4py initialize it, with "
                "mpi4py.rc.thread_level='multiple', which is its default"
            )
        self._comm = comm.Dup()
        self.rank, self.size, self.world_rank = self._comm.rank, self._comm.size, MPI.COMM_WORLD.rank
        here = self._comm.Split_type(MPI.COMM_TYPE_SHARED)
        self._ranks_here = here.size
        here.Free()
        self._started = 0
        self._left: dict[int, int] = {}  # by rank that has ended, how many collectives it had started
        self._parting: list[tuple[MPI.Request, np.ndarray]] = []

    def probe_transport(self) -> "MpiTransport":
        return self  # a step ends in the thread that issues all collectives

    def allreduce(self, name: str, array: np.ndarray) -> CollectiveHandle:
        if array.dtype == np.float16:
            return self._under_way(
                self._comm.Iallreduce(MPI.IN_PLACE, [array.view("u2"), MPI.UINT16_T], _SUM_OF_HALVES), array
            )
        return self._under_way(self._comm.Iallreduce(MPI.IN_PLACE, array, MPI.SUM), array)

    def broadcast_equal(self, message: np.ndarray, root: int) -> CollectiveHandle:
        row = message[None].copy()
        return self._under_way(self._comm.Ibcast([row, MPI.BYTE], root), row)

    def allgather_equal(self, message: np.ndarray) -> CollectiveHandle:
        rows = np.empty((self.size, message.size), np.uint8)
        return self._under_way(self._comm.Iallgather([message, MPI.BYTE], [rows, MPI.BYTE]), rows)

    def alltoall_known(self, message: np.ndarray, splits: list[int], received: list[int]) -> CollectiveHandle:
        parts = np.empty(sum(received), np.uint8)
        sent, got = [message, splits, _starts(splits), MPI.BYTE], [parts, received, _starts(received), MPI.BYTE]
        return self._under_way(self._comm.Ialltoallv(sent, got), parts)

    def send_and_receive(self, outgoing: dict[int, np.ndarray], incoming: dict[int, int]) -> dict[int, np.ndarray]:
        buffers = {rank: np.empty(size, np.uint8) for rank, size in incoming.items()}
        requests = [self._comm.Irecv([buffer, MPI.BYTE], rank, _DATA) for rank, buffer in buffers.items()]
        requests += [self._comm.Isend([payload, MPI.BYTE], rank, _DATA) for rank, payload in outgoing.items()]
        self._wait(lambda: MPI.Request.Testall(requests), self._started)
        return buffers

    def gather_to(self, name: str, payload: np.ndarray, to: int) -> list[np.ndarray]:
        """Send every rank's payload to one rank, a collective.

        Args:
            name: The collective's name.
            payload: uint8[m]; m may differ between ranks.
            to: The receiving rank.

        Returns:
            All ranks' payloads in the order of ranks on rank `to`, an empty list elsewhere.
        """
        lengths = lengths_in(self.allgather_equal(head_of(payload)).wait()).tolist()
        joined = np.empty(sum(lengths) if self.rank == to else 0, np.uint8)
        received = [joined, lengths, _starts(lengths), MPI.BYTE] if self.rank == to else None
        self._under_way(self._comm.Igatherv([payload, MPI.BYTE], received, to), joined).wait()
        return np.split(joined, _starts(lengths)[1:]) if self.rank == to else []

    def leave(self) -> None:
        """Tell the other ranks that this one starts no more collectives. Not a collective."""
        started = np.array([self._started], "<i8")
        self._parting = [
            (self._comm.Isend([started, MPI.BYTE], rank, _LEFT), started) for rank in range(self.size) if rank != self.rank
        ]

    def _under_way(self, request: MPI.Request, result: np.ndarray) -> CollectiveHandle:
        """The request keeps what is sent alive."""
        self._started += 1
        return CollectiveHandle(functools.partial(self._finish, request, result, self._started))

    def _finish(self, request: MPI.Request, result: np.ndarray, number: int) -> np.ndarray:
        self._wait(request.Test, number)
        return result

    def _wait(self, done: Callable[[], bool], number: int) -> None:
        """Wait for the collective of this number. Raises ExchangeError if a rank has ended before it."""
        polls = 0

        def is_over() -> bool:
            nonlocal polls
            polls += 1
            return done() or polls % _LOOK == 0 and self._was_left(number)

        wait_until(is_over, self._ranks_here)

    def _was_left(self, number: int) -> bool:
        status = MPI.Status()
        while self._comm.Iprobe(MPI.ANY_SOURCE, _LEFT, status):
            started = np.empty(1, "<i8")
            self._comm.Recv([started, MPI.BYTE], status.source, _LEFT)
            self._left[status.source] = int(started[0])
        gone = sorted(rank for rank, started in self._left.items() if started < number)
        if gone:
            raise ExchangeError(
                f"ranks {gone} have ended, and rank {self.rank} still waits for them: all make as many steps"
            )
        return False


def _starts(splits: list[int]) -> list[int]:
    return [0, *np.cumsum(splits[:-1]).tolist()]
