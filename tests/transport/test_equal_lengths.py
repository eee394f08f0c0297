"""Payloads of different lengths over collectives of equal lengths: what arrives, and how often a rest has to follow."""

import itertools
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from grace_ext.transport import CollectiveHandle, InProcessGroup
from grace_ext.transport.equal_lengths import EqualLengthTransport, capacity_for

RANKS = 3


class OverThreads(EqualLengthTransport):
    """The collectives of equal lengths, between threads; what is not of equal length is an error."""

    def __init__(self, transport):
        super().__init__()
        self.rank, self.size, self._transport, self._number = transport.rank, transport.size, transport, itertools.count()

    def allgather_equal(self, message):
        rows = self._transport.allgather(f"gather{next(self._number)}", message).wait().reshape(self.size, message.size)
        return CollectiveHandle.finished(rows)

    def broadcast_equal(self, message, root):
        rows = self.allgather_equal(message).wait()
        return CollectiveHandle.finished(rows[root : root + 1])

    def alltoall_known(self, message, splits, received):
        parts = self._transport.alltoall(f"exchange{next(self._number)}", message, splits).wait()
        assert parts.size == sum(received)
        return CollectiveHandle.finished(parts)

    def send_and_receive(self, outgoing, incoming):
        payloads = [outgoing.get(rank, np.empty(0, np.uint8)) for rank in range(self.size)]
        joined = self._transport.alltoall(
            f"rest{next(self._number)}", np.concatenate(payloads), [one.size for one in payloads]
        ).wait()
        ends = np.cumsum([incoming.get(rank, 0) for rank in range(self.size)])
        return {rank: part for rank, part in enumerate(np.split(joined, ends[:-1])) if rank in incoming}


def on_all_ranks(function):
    group = InProcessGroup(RANKS, timeout=600)
    with ThreadPoolExecutor(RANKS) as pool:
        return list(pool.map(lambda rank: function(OverThreads(group.transport(rank))), range(RANKS)))


def payload(size, rank):
    return np.random.default_rng([size, rank]).integers(0, 256, size, np.uint8)


STEPS = [(5, 0, 9), (5, 0, 9), (200, 3, 9), (201, 3, 0), (0, 0, 0), (90, 500, 30)]


def test_all_ranks_get_all_payloads_whatever_their_lengths():
    def run(transport):
        for sizes in STEPS:
            received = transport.allgather("a", payload(sizes[transport.rank], transport.rank)).wait()
            assert received.tobytes() == b"".join(payload(size, rank).tobytes() for rank, size in enumerate(sizes))
        return transport.second_collectives

    # The first has no capacity; 9 bytes fit in that of the second; 200 and 500 do not fit.
    assert on_all_ranks(run) == [3] * RANKS


def test_the_padding_is_what_is_sent_beside_the_payload():
    def run(transport):
        handles = [transport.allgather("a", payload(100, transport.rank)) for _ in range(1)]
        handles[0].wait()
        second = transport.allgather("a", payload(40, transport.rank))
        second.wait()
        return handles[0].padding, second.padding

    assert on_all_ranks(run) == [(8, 8 + capacity_for(100) - 40)] * RANKS


@pytest.mark.parametrize("root", range(RANKS))
def test_a_broadcast_gives_the_roots_payload(root):
    def run(transport):
        for size in (3, 40, 2):
            own = payload(size, root) if transport.rank == root else np.empty(0, np.uint8)
            assert transport.broadcast("b", own, root).wait().tobytes() == payload(size, root).tobytes()

    on_all_ranks(run)


def test_an_alltoall_has_a_capacity_for_each_pair():
    def run(transport):
        for step, sizes in enumerate(STEPS):
            splits = [sizes[(transport.rank + to) % RANKS] for to in range(RANKS)]
            parts = [payload(size, 10 * transport.rank + to) for to, size in enumerate(splits)]
            received = transport.alltoall("c", np.concatenate(parts), splits).wait()
            expected = [payload(sizes[(rank + transport.rank) % RANKS], 10 * rank + transport.rank) for rank in range(RANKS)]
            assert received.tobytes() == np.concatenate(expected).tobytes(), step

    on_all_ranks(run)


def test_forgotten_lengths_leave_no_capacity():
    def run(transport):
        transport.allgather("a", payload(100, transport.rank)).wait()
        transport.forget_lengths()
        handle = transport.allgather("a", payload(1, transport.rank))
        handle.wait()
        return handle.padding

    assert on_all_ranks(run) == [8] * RANKS
