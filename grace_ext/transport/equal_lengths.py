"""Payloads of different lengths over a library whose collectives take messages of equal lengths.

A payload has its length in front, and is padded with zeros to the capacity that the name's last payloads, which all ranks
have seen, would have needed. If some rank's payload is longer, all ranks see it, and a second collective carries the rests.
"""

import collections
import functools
import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np

from .base import CollectiveHandle, Transport
from .padding import with_headroom

HEAD = 8  # bytes before a payload: its length
_KEPT = 8  # steps whose longest payload is remembered


class EqualLengthTransport(Transport):
    """Makes collectives of different lengths out of those of equal lengths, which a subclass has.

    All ranks start the collectives in the same order. In an alltoall each pair of ranks has a capacity of its own, and
    sends the rest from one to the other.
    """

    in_order = True

    def __init__(self) -> None:
        #: By name the lengths of the longest payloads of the last steps: a codec that now and then says "not finite" in a
        #: few bytes keeps its capacity, and one whose density was lowered does not keep it for long.
        self.longest: dict[str, collections.deque[int]] = {}
        #: The same of alltoall, by name, sender and receiver.
        self.longest_of_pairs: dict[tuple[str, int, int], collections.deque[int]] = {}
        #: Number of allgathers and broadcasts that needed a second collective.
        self.second_collectives = 0

    def forget_lengths(self) -> None:
        self.longest.clear()
        self.longest_of_pairs.clear()

    def allgather(self, name: str, payload: np.ndarray) -> CollectiveHandle:
        return _Payloads(self, name, payload)

    def broadcast(self, name: str, payload: np.ndarray, root: int) -> CollectiveHandle:
        return _Payloads(self, name, payload, root)

    def alltoall(self, name: str, payload: np.ndarray, splits: list[int]) -> CollectiveHandle:
        bounds = [0, *itertools.accumulate(splits)]
        return _Pairs(self, name, [payload[start:end] for start, end in itertools.pairwise(bounds)])

    def join(self, parts: Sequence[Any]) -> Any:
        """Make one message of several.

        Args:
            parts: uint8[m] each, of the host or of the `message_device`.

        Returns:
            uint8[n], of the `message_device` if one of the parts is.
        """
        return np.concatenate(parts)

    def head_at(self, message: Any, start: int) -> np.ndarray:
        """Read a head.

        Args:
            message: uint8[n], of the host or of the `message_device`.
            start: Where the head begins.

        Returns:
            uint8[HEAD] of the host.
        """
        return message[start : start + HEAD]

    def allgather_equal(self, message: np.ndarray) -> CollectiveHandle:
        """Give all ranks the messages of all.

        Args:
            message: uint8[m], the same m on all ranks.

        Returns:
            A handle of uint8[ranks, m].
        """
        raise NotImplementedError

    def broadcast_equal(self, message: np.ndarray, root: int) -> CollectiveHandle:
        """Give all ranks the message of one.

        Args:
            message: uint8[m], the same m on all ranks.
            root: The rank whose message it is.

        Returns:
            A handle of uint8[1, m].
        """
        raise NotImplementedError

    def alltoall_known(self, message: Any, splits: list[int], received: list[int]) -> CollectiveHandle:
        """Send each rank its part of a message.

        Args:
            message: uint8[sum of splits], the parts in the order of ranks, of the host or of the `message_device`.
            splits: The bytes for each rank.
            received: The bytes from each rank.

        Returns:
            A handle of uint8[sum of received], the parts in the order of ranks, where the message was.
        """
        raise NotImplementedError

    def send_and_receive(self, outgoing: dict[int, Any], incoming: dict[int, int]) -> dict[int, np.ndarray]:
        """Send messages to some ranks, receive some from others, and wait for them.

        Args:
            outgoing: uint8[m] by receiver, of the host or of the `message_device`.
            incoming: Lengths by sender.

        Returns:
            uint8[m] by sender, of the host.
        """
        raise NotImplementedError


class _Payloads(CollectiveHandle):
    def __init__(self, transport: "EqualLengthTransport", name: str, payload: np.ndarray, root: int | None = None):
        """root: whose payload all ranks get; None for those of all."""
        super().__init__(self._receive)
        self._transport, self._payload = transport, payload
        self._collect = (
            transport.allgather_equal if root is None else functools.partial(transport.broadcast_equal, root=root)
        )
        self._sends = root in (None, transport.rank)
        self._longest = transport.longest.setdefault(name, collections.deque(maxlen=_KEPT))
        self._capacity = capacity_for(max(self._longest)) if self._longest else 0
        self._first = self._collect(padded_message([head_of(payload), payload[: self._capacity]], HEAD + self._capacity))

    def _receive(self) -> np.ndarray:
        rows = self._first.wait()
        lengths = lengths_in(rows)
        longest, capacity, transport = int(lengths.max()), self._capacity, self._transport
        self._longest.append(longest)
        parts = [row[HEAD : HEAD + min(length, capacity)] for row, length in zip(rows, lengths, strict=True)]
        if longest > capacity:
            transport.second_collectives += 1
            rests = self._collect(padded_message([self._payload[capacity:]], longest - capacity)).wait()
            parts = [
                part
                for row, length, first in zip(rests, lengths, parts, strict=True)
                for part in (first, row[: max(0, length - capacity)])
            ]
        self.padding = HEAD + max(capacity, longest) - self._payload.size if self._sends else 0
        return np.concatenate(parts)


class _Pairs(CollectiveHandle):
    """An alltoall. Nothing goes from a rank to itself but the payload for it."""

    def __init__(self, transport: "EqualLengthTransport", name: str, payloads: list[Any]):
        super().__init__(self._receive)
        self._transport, self._payloads = transport, payloads
        own, ranks = transport.rank, range(transport.size)
        self._sent, self._received = (
            [self._kept(name, *pair(rank)) for rank in ranks]
            for pair in (lambda rank: (own, rank), lambda rank: (rank, own))
        )
        capacities, self._capacities = (
            [capacity_for(max(kept)) if kept else 0 for kept in lists] for lists in (self._sent, self._received)
        )
        messages = [
            transport.join([head_of(payload), payload[:capacity], np.zeros(max(capacity - len(payload), 0), np.uint8)])
            for payload, capacity in zip(payloads, capacities, strict=True)
        ]
        messages[own] = messages[own][:0]
        self._rests = {
            rank: payload[capacity:]
            for rank, (payload, capacity) in enumerate(zip(payloads, capacities, strict=True))
            if len(payload) > capacity and rank != own
        }
        self.padding = sum(map(len, messages)) + sum(map(len, self._rests.values())) - sum(map(len, payloads))
        self._first = transport.alltoall_known(
            transport.join(messages),
            [len(message) for message in messages],
            [HEAD + capacity if rank != own else 0 for rank, capacity in enumerate(self._capacities)],
        )

    def _kept(self, name: str, sender: int, receiver: int) -> collections.deque[int]:
        return self._transport.longest_of_pairs.setdefault((name, sender, receiver), collections.deque(maxlen=_KEPT))

    def _receive(self) -> np.ndarray:
        received, own = self._first.wait(), self._transport.rank
        parts, incoming, at = [], {}, 0
        for rank, (capacity, payload) in enumerate(zip(self._capacities, self._payloads, strict=True)):
            self._sent[rank].append(len(payload))
            if rank == own:
                parts.append(payload)
                continue
            (length,) = lengths_in(self._transport.head_at(received, at)[None])
            self._received[rank].append(int(length))
            parts.append(received[at + HEAD : at + HEAD + min(length, capacity)])
            if length > capacity:
                incoming[rank] = int(length) - capacity
            at += HEAD + capacity
        for rank, rest in self._transport.send_and_receive(self._rests, incoming).items():
            parts[rank] = self._transport.join([parts[rank], rest])
        return self._transport.join(parts)


def head_of(payload: Any) -> np.ndarray:
    """What goes before a payload.

    Args:
        payload: uint8[m].

    Returns:
        uint8[HEAD].
    """
    return np.array([len(payload)], "<i8").view(np.uint8)


def lengths_in(rows: np.ndarray) -> np.ndarray:
    """The lengths of payloads, as their heads say.

    Args:
        rows: uint8[ranks, m], with a head in front of each row.

    Returns:
        int64[ranks].
    """
    return rows[:, :HEAD].copy().view("<i8").ravel()


def padded_message(parts: list[np.ndarray], size: int) -> np.ndarray:
    """Parts one after the other, padded with zeros.

    Args:
        parts: uint8[m] each.
        size: How many bytes to make.

    Returns:
        uint8[size].
    """
    return np.concatenate([*parts, np.zeros(size - sum(part.size for part in parts), np.uint8)])


def capacity_for(longest: int) -> int:
    """A little more than the longest payload of late, since the next one may be longer.

    Args:
        longest: Its length.

    Returns:
        The bytes to reserve for the next one.
    """
    return with_headroom(longest) + 32
