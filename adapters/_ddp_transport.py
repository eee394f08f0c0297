"""The collectives of grace_ext over torch.distributed."""

import collections

import numpy as np
import torch
import torch.distributed as dist

from grace_ext.communicators import Transport

HEAD = 8  # bytes before a payload: its length
KEPT = 8  # steps whose longest payload is remembered


class GroupTransport(Transport):
    """Over one process group, which pairs collectives by order: the same thread issues all of them, in the same order on
    all ranks. Not for use in a group of which others issue collectives.

    Payloads of different lengths go by a gather of equal ones: the length in front, then the payload, padded with zeros to
    the room that the name's last payloads, which all ranks have seen, would have needed. If some rank's payload is longer,
    all ranks see it, and a second gather carries the rests.
    """

    can_probe = True  # a step ends in the thread that issues all collectives

    def __init__(self, group, device: torch.device):
        """device: where the group's backend wants tensors to be."""
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        #: By name the lengths of the longest payloads of the last steps: a codec that now and then says "not finite" in a
        #: few bytes keeps its room, and one whose density was lowered does not keep it for long.
        self.longest: dict[str, collections.deque[int]] = {}
        #: How many payloads did not fit.
        self.second_gathers = 0
        self._group, self._device = group, device

    def allgather(self, name, payload):
        return _Payloads(self, name, payload)

    def allreduce(self, name, array):
        tensor = torch.from_numpy(array).to(self._device)
        return _Sum(dist.all_reduce(tensor, group=self._group, async_op=True), tensor)

    def send(self, name: str, payload: np.ndarray, to: int) -> list[np.ndarray]:
        """A collective that returns all ranks' payloads, uint8[m], on rank `to` only, an empty list elsewhere."""
        lengths = _lengths(self.gather(_head(payload)).wait())
        message = torch.from_numpy(_padded([payload], int(lengths.max()))).to(self._device)
        rows = [torch.empty_like(message) for _ in lengths] if self.rank == to else None
        dist.gather(message, rows, dist.get_global_rank(self._group, to), group=self._group)
        return [row[:length].cpu().numpy() for row, length in zip(rows or [], lengths, strict=False)]

    def gather(self, message: np.ndarray) -> "_Rows":
        """uint8[m], the same m on all ranks -> handle of uint8[ranks, m]."""
        own = torch.from_numpy(message).to(self._device)
        rows = torch.empty(self.size, message.size, dtype=torch.uint8, device=self._device)
        return _Rows(dist.all_gather(list(rows), own, group=self._group, async_op=True), rows, own)


class _Rows:
    def __init__(self, work, rows, own):
        self._work, self._rows = work, rows
        self._own = own  # alive until it is sent

    def wait(self) -> np.ndarray:
        self._work.wait()
        return self._rows.cpu().numpy()


class _Sum:
    def __init__(self, work, tensor):
        self._work, self._tensor = work, tensor

    def wait(self) -> np.ndarray:
        self._work.wait()
        return self._tensor.cpu().numpy()


class _Payloads:
    #: What was sent on top of the payload.
    padding: int

    def __init__(self, transport: GroupTransport, name: str, payload: np.ndarray):
        self._transport, self._payload = transport, payload
        self._longest = transport.longest.setdefault(name, collections.deque(maxlen=KEPT))
        self._room = room_for(max(self._longest)) if self._longest else 0
        self._first = transport.gather(_padded([_head(payload), payload[:self._room]], HEAD + self._room))

    def wait(self) -> np.ndarray:
        rows = self._first.wait()
        lengths = _lengths(rows)
        longest, room, transport = int(lengths.max()), self._room, self._transport
        self._longest.append(longest)
        parts = [row[HEAD:HEAD + min(length, room)] for row, length in zip(rows, lengths, strict=True)]
        if longest > room:
            transport.second_gathers += 1
            rests = transport.gather(_padded([self._payload[room:]], longest - room)).wait()
            parts = [part for row, length, first in zip(rests, lengths, parts, strict=True)
                     for part in (first, row[:max(0, length - room)])]
        self.padding = HEAD + max(room, longest) - self._payload.size
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
        message[at:at + part.size] = part
        at += part.size
    return message


def room_for(longest: int) -> int:
    """A little more than the longest payload of late, since the next one may be longer."""
    return longest + longest // 64 + 32
