"""The collectives of grace_ext over one of PyTorch's process groups, whoever has made it."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from grace_ext.transport import CollectiveHandle, Transport
from grace_ext.transport.equal_lengths import EqualLengthTransport, head_of, lengths_in, padded_message

#: The most bytes that a rank gets from all, for messages that go from each rank to each other one: on hosts with a rank each, or
#: on a single host, and on several hosts with several ranks.
DIRECT, DIRECT_FROM_SHARED_HOSTS = 4 * 2**20, 2**16
_TAG = 0  # of messages between two ranks, which are there in the order in which they were sent


class C10dTransport(EqualLengthTransport):
    """Over one process group, which pairs collectives by order: the same thread issues all of them, in the same order on
    all ranks. Not for use in a group of which others issue collectives. Subclasses have the group."""

    #: torch.distributed.ProcessGroup, or one of its backends.
    group: Any

    def __init__(self, rank: int, size: int, world_rank: int, device: torch.device):
        """device: where the group's backend wants tensors to be."""
        super().__init__()
        self.rank, self.size, self.world_rank, self._device = rank, size, world_rank, device
        self.message_device = None if device.type == "cpu" else device

    def probe_transport(self) -> Transport:
        return self  # a step ends in the thread that issues all collectives

    def allreduce(self, name: str, array: np.ndarray | torch.Tensor) -> CollectiveHandle:
        tensor = self._tensor(array)
        return self._under_way(self.group.allreduce([tensor]), tensor, stays=isinstance(array, torch.Tensor))

    def join(self, parts: Sequence[np.ndarray | torch.Tensor]) -> np.ndarray | torch.Tensor:
        if any(isinstance(part, torch.Tensor) for part in parts):
            return torch.cat([self._tensor(part) for part in parts])
        return super().join(parts)

    def head_at(self, message: np.ndarray | torch.Tensor, start: int) -> np.ndarray:
        head = super().head_at(message, start)
        return head.cpu().numpy() if isinstance(head, torch.Tensor) else head

    def _tensor(self, array: np.ndarray | torch.Tensor) -> torch.Tensor:
        return array if isinstance(array, torch.Tensor) else torch.from_numpy(array).to(self._device)

    def gather_to(self, name: str, payload: np.ndarray, to: int) -> list[np.ndarray]:
        """A collective that returns all ranks' payloads, uint8[m], on rank `to` only, an empty list elsewhere."""
        lengths = lengths_in(self.allgather_equal(head_of(payload)).wait())
        message = self._tensor(padded_message([payload], int(lengths.max())))
        rows = [torch.empty_like(message) for _ in lengths] if self.rank == to else []
        options = dist.GatherOptions()
        options.rootRank = to
        self._under_way(self.group.gather([rows] if rows else [], [message], options), message).wait()
        return [row[:length].cpu().numpy() for row, length in zip(rows, lengths, strict=False)]

    def broadcast_equal(self, message: np.ndarray, root: int) -> CollectiveHandle:
        row = self._tensor(message[None])
        options = dist.BroadcastOptions()
        options.rootRank = root
        return self._under_way(self.group.broadcast([row], options), row)

    def allgather_equal(self, message: np.ndarray) -> CollectiveHandle:
        own = self._tensor(message)
        rows = torch.empty(self.size, message.size, dtype=torch.uint8, device=self._device)
        if self._goes_directly(rows.numel()):
            copies = own.repeat(self.size)
            return self._under_way(self.group.alltoall_base(rows.view(-1), copies, [], []), rows, copies)
        return self._under_way(self.group.allgather([list(rows)], [own]), rows, own)

    def _goes_directly(self, received: int) -> bool:
        """Whether messages go from each rank to each other one, in one round trip. Gloo's allgather is a ring, which takes size - 1
        of them one after the other, but crosses the link between two hosts once for all ranks of a host. As long as ranks have not
        told each other their hosts, these are taken to have several.

        Args:
            received: Bytes that a rank gets.

        Returns:
            The answer, the same on all ranks.
        """
        if self._device.type != "cpu":
            return False
        alone = self.hosts is not None and len(set(self.hosts)) in (1, self.size)
        return received <= (DIRECT if alone else DIRECT_FROM_SHARED_HOSTS)

    def alltoall_known(self, message: np.ndarray | torch.Tensor, splits: list[int], received: list[int]) -> CollectiveHandle:
        own = self._tensor(message)
        parts = torch.empty(sum(received), dtype=torch.uint8, device=self._device)
        work = self.group.alltoall_base(parts, own, received, splits)
        return self._under_way(work, parts, own, stays=isinstance(message, torch.Tensor))

    def send_and_receive(
        self, outgoing: dict[int, np.ndarray | torch.Tensor], incoming: dict[int, int]
    ) -> dict[int, np.ndarray]:
        sent = {rank: self._tensor(payload) for rank, payload in outgoing.items()}
        buffers = {rank: torch.empty(size, dtype=torch.uint8, device=self._device) for rank, size in incoming.items()}
        for handle in self._start_pairs(sent, buffers):
            handle.wait()
        return {rank: buffer.cpu().numpy() for rank, buffer in buffers.items()}

    def _start_pairs(self, sent: dict[int, torch.Tensor], buffers: dict[int, torch.Tensor]) -> list[CollectiveHandle]:
        """Start to send to some ranks, and to receive from others."""
        return [
            self._under_way(start([tensor], rank, _TAG), tensor)
            for start, tensors in ((self.group.send, sent), (self.group.recv, buffers))
            for rank, tensor in tensors.items()
        ]

    def _under_way(
        self, work: dist.Work, result: torch.Tensor, *sent: torch.Tensor, stays: bool = False
    ) -> CollectiveHandle:
        """sent: alive until it has left. stays: whether the result is a tensor, where it is."""

        def wait() -> np.ndarray | torch.Tensor:
            work.wait()
            sent  # noqa: B018
            return result if stays else result.cpu().numpy()

        return CollectiveHandle(wait)
