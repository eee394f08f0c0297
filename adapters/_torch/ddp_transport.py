"""The collectives of grace_ext over torch.distributed."""

import collections
import functools

import numpy as np
import torch
import torch.distributed as dist

from grace_ext.transport import CollectiveHandle, Transport

HEAD = 8  # bytes before a payload: its length
KEPT = 8  # steps whose longest payload is remembered


class GroupTransport(Transport):
    """Over one process group, which pairs collectives by order: the same thread issues all of them, in the same order on
    all ranks. Not for use in a group of which others issue collectives.

    Payloads of different lengths go by a gather of equal ones: the length in front, then the payload, padded with zeros to
    the room that the name's last payloads, which all ranks have seen, would have needed. If some rank's payload is longer,
    all ranks see it, and a second gather carries the rests. In an alltoall each pair of ranks has a room of its own, and
    sends the rest from one to the other.
    """

    def __init__(self, group, device: torch.device):
        """device: where the group's backend wants tensors to be."""
        self.rank, self.size, self.world_rank = dist.get_rank(group), dist.get_world_size(group), dist.get_rank()
        #: By name the lengths of the longest payloads of the last steps: a codec that now and then says "not finite" in a
        #: few bytes keeps its room, and one whose density was lowered does not keep it for long.
        self.longest: dict[str, collections.deque[int]] = {}
        #: The same of alltoall, by name, sender and receiver.
        self.longest_of_pairs: dict[tuple[str, int, int], collections.deque[int]] = {}
        #: How many payloads did not fit.
        self.second_gathers = 0
        self._group, self._device = group, device

    def between_steps(self):
        return self  # a step ends in the thread that issues all collectives

    def forget_lengths(self) -> None:
        """On all ranks in the same step: for names that now mean something else."""
        self.longest.clear()
        self.longest_of_pairs.clear()

    def allgather(self, name, payload):
        return _Payloads(self, name, payload)

    def allreduce(self, name, array):
        tensor = torch.from_numpy(array).to(self._device)
        return _under_way(dist.all_reduce(tensor, group=self._group, async_op=True), tensor)

    def broadcast(self, name, payload, root):
        return _Payloads(self, name, payload, root)

    def alltoall(self, name, payload, splits):
        return _Pairs(self, name, np.split(payload, np.cumsum(splits)[:-1]))

    def send(self, name: str, payload: np.ndarray, to: int) -> list[np.ndarray]:
        """A collective that returns all ranks' payloads, uint8[m], on rank `to` only, an empty list elsewhere."""
        lengths = _lengths(self.gather(_head(payload)).wait())
        message = torch.from_numpy(_padded([payload], int(lengths.max()))).to(self._device)
        rows = [torch.empty_like(message) for _ in lengths] if self.rank == to else None
        dist.gather(message, rows, dist.get_global_rank(self._group, to), group=self._group)
        return [row[:length].cpu().numpy() for row, length in zip(rows or [], lengths, strict=False)]

    def spread(self, message: np.ndarray, root: int) -> CollectiveHandle:
        """uint8[m], the same m on all ranks -> handle of uint8[1, m], the root's."""
        row = torch.from_numpy(message[None]).to(self._device)
        source = dist.get_global_rank(self._group, root)
        return _under_way(dist.broadcast(row, source, self._group, async_op=True), row, row)

    def gather(self, message: np.ndarray) -> CollectiveHandle:
        """uint8[m], the same m on all ranks -> handle of uint8[ranks, m]."""
        own = torch.from_numpy(message).to(self._device)
        rows = torch.empty(self.size, message.size, dtype=torch.uint8, device=self._device)
        return _under_way(dist.all_gather(list(rows), own, group=self._group, async_op=True), rows, own)

    def exchange(self, message: np.ndarray, splits: list[int], received: list[int]) -> CollectiveHandle:
        """uint8[sum of splits] and how many bytes each rank gets of it, and this one of each -> handle of uint8."""
        own = torch.from_numpy(message).to(self._device)
        joined = torch.empty(sum(received), dtype=torch.uint8, device=self._device)
        return _under_way(dist.all_to_all_single(joined, own, received, splits, self._group, async_op=True), joined, own)

    def exchange_with(self, outgoing: dict[int, np.ndarray], incoming: dict[int, int]) -> dict[int, np.ndarray]:
        """Send uint8[m] to some ranks, receive as many bytes as said from others; returns them by rank. Waits."""
        sent = {rank: torch.from_numpy(payload).to(self._device) for rank, payload in outgoing.items()}
        rooms = {rank: torch.empty(size, dtype=torch.uint8, device=self._device) for rank, size in incoming.items()}
        operations = [
            dist.P2POp(operation, tensor, dist.get_global_rank(self._group, rank), self._group)
            for operation, tensors in ((dist.isend, sent), (dist.irecv, rooms))
            for rank, tensor in tensors.items()
        ]
        for work in dist.batch_isend_irecv(operations) if operations else ():
            work.wait()
        return {rank: room.cpu().numpy() for rank, room in rooms.items()}


def _under_way(work, result: torch.Tensor, *sent: torch.Tensor) -> CollectiveHandle:
    """sent: alive until it has left."""

    def wait():
        work.wait()
        sent  # noqa: B018
        return result.cpu().numpy()

    return CollectiveHandle(wait)


class _Payloads(CollectiveHandle):
    def __init__(self, transport: GroupTransport, name: str, payload: np.ndarray, root: int | None = None):
        """root: whose payload all ranks get; None for those of all."""
        super().__init__(self._receive)
        self._transport, self._payload = transport, payload
        self._collect = transport.gather if root is None else functools.partial(transport.spread, root=root)
        self._sends = root in (None, transport.rank)
        self._longest = transport.longest.setdefault(name, collections.deque(maxlen=KEPT))
        self._room = room_for(max(self._longest)) if self._longest else 0
        self._first = self._collect(_padded([_head(payload), payload[: self._room]], HEAD + self._room))

    def _receive(self) -> np.ndarray:
        rows = self._first.wait()
        lengths = _lengths(rows)
        longest, room, transport = int(lengths.max()), self._room, self._transport
        self._longest.append(longest)
        parts = [row[HEAD : HEAD + min(length, room)] for row, length in zip(rows, lengths, strict=True)]
        if longest > room:
            transport.second_gathers += 1
            rests = self._collect(_padded([self._payload[room:]], longest - room)).wait()
            parts = [
                part
                for row, length, first in zip(rests, lengths, parts, strict=True)
                for part in (first, row[: max(0, length - room)])
            ]
        self.padding = HEAD + max(room, longest) - self._payload.size if self._sends else 0
        return np.concatenate(parts)


class _Pairs(CollectiveHandle):
    """An alltoall. Nothing goes from a rank to itself but the payload for it."""

    def __init__(self, transport: GroupTransport, name: str, payloads: list[np.ndarray]):
        super().__init__(self._receive)
        self._transport, self._payloads = transport, payloads
        own, ranks = transport.rank, range(transport.size)
        self._sent, self._received = (
            [self._kept(name, *pair(rank)) for rank in ranks]
            for pair in (lambda rank: (own, rank), lambda rank: (rank, own))
        )
        rooms, self._rooms = (
            [room_for(max(kept)) if kept else 0 for kept in lists] for lists in (self._sent, self._received)
        )
        messages = [
            _padded([_head(payload), payload[:room]], HEAD + room) for payload, room in zip(payloads, rooms, strict=True)
        ]
        messages[own] = messages[own][:0]
        self._rests = {
            rank: payload[room:]
            for rank, (payload, room) in enumerate(zip(payloads, rooms, strict=True))
            if payload.size > room and rank != own
        }
        self.padding = (
            sum(message.size for message in messages)
            + sum(rest.size for rest in self._rests.values())
            - sum(payload.size for payload in payloads)
        )
        self._first = transport.exchange(
            np.concatenate(messages),
            [message.size for message in messages],
            [HEAD + room if rank != own else 0 for rank, room in enumerate(self._rooms)],
        )

    def _kept(self, name, sender, receiver) -> collections.deque[int]:
        return self._transport.longest_of_pairs.setdefault((name, sender, receiver), collections.deque(maxlen=KEPT))

    def _receive(self) -> np.ndarray:
        joined, own = self._first.wait(), self._transport.rank
        parts, incoming, at = [], {}, 0
        for rank, (room, payload) in enumerate(zip(self._rooms, self._payloads, strict=True)):
            self._sent[rank].append(payload.size)
            if rank == own:
                parts.append(payload)
                continue
            (length,) = _lengths(joined[None, at : at + HEAD])
            self._received[rank].append(int(length))
            parts.append(joined[at + HEAD : at + HEAD + min(length, room)])
            if length > room:
                incoming[rank] = int(length) - room
            at += HEAD + room
        for rank, rest in self._transport.exchange_with(self._rests, incoming).items():
            parts[rank] = np.concatenate([parts[rank], rest])
        return np.concatenate(parts)


def _head(payload: np.ndarray) -> np.ndarray:
    return np.array([payload.size], "<i8").view(np.uint8)


def _lengths(rows: np.ndarray) -> np.ndarray:
    """int64[ranks], of the heads in front of rows, uint8[ranks, m]."""
    return rows[:, :HEAD].copy().view("<i8").ravel()


def _padded(parts: list[np.ndarray], size: int) -> np.ndarray:
    """uint8[size]: the parts, then zeros."""
    message = np.zeros(size, np.uint8)
    at = 0
    for part in parts:
        message[at : at + part.size] = part
        at += part.size
    return message


def room_for(longest: int) -> int:
    """A little more than the longest payload of late, since the next one may be longer."""
    return longest + longest // 64 + 32
