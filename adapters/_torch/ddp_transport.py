"""The collectives of grace_ext over torch.distributed."""

import datetime
import uuid
from collections.abc import Sequence
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from grace_ext import ConfigError
from grace_ext.transport import CollectiveHandle
from grace_ext.transport.equal_lengths import EqualLengthTransport, head_of, lengths_in, padded_message

from .gloo_exit import wait_at_exit

#: The most bytes that a rank gets from all, for messages that go from each rank to each other one: on hosts with a rank each, or
#: on a single host, and on several hosts with several ranks.
DIRECT, DIRECT_FROM_SHARED_HOSTS = 4 * 2**20, 2**16


class GroupTransport(EqualLengthTransport):
    """Over one process group, which pairs collectives by order: the same thread issues all of them, in the same order on
    all ranks. Not for use in a group of which others issue collectives."""

    def __init__(self, group, device: torch.device):
        """device: where the group's backend wants tensors to be."""
        super().__init__()
        self.rank, self.size, self.world_rank = dist.get_rank(group), dist.get_world_size(group), dist.get_rank()
        self._group, self._device = group, device
        self.message_device = None if device.type == "cpu" else device
        #: Ranks of the job, in the order of the group's.
        self.members: list[int] = dist.get_process_group_ranks(group)
        self.group_name: str = group.group_name

    def probe_transport(self):
        return self  # a step ends in the thread that issues all collectives

    def allreduce(self, name: str, array: np.ndarray | torch.Tensor) -> CollectiveHandle:
        tensor = self._tensor(array)
        work = dist.all_reduce(tensor, group=self._group, async_op=True)
        return _under_way(work, tensor, stays=isinstance(array, torch.Tensor))

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
        message = torch.from_numpy(padded_message([payload], int(lengths.max()))).to(self._device)
        rows = [torch.empty_like(message) for _ in lengths] if self.rank == to else None
        dist.gather(message, rows, dist.get_global_rank(self._group, to), group=self._group)
        return [row[:length].cpu().numpy() for row, length in zip(rows or [], lengths, strict=False)]

    def broadcast_equal(self, message: np.ndarray, root: int) -> CollectiveHandle:
        row = torch.from_numpy(message[None]).to(self._device)
        source = dist.get_global_rank(self._group, root)
        return _under_way(dist.broadcast(row, source, self._group, async_op=True), row, row)

    def allgather_equal(self, message: np.ndarray) -> CollectiveHandle:
        own = torch.from_numpy(message).to(self._device)
        rows = torch.empty(self.size, message.size, dtype=torch.uint8, device=self._device)
        if self._goes_directly(rows.numel()):
            copies = own.repeat(self.size)
            work = dist.all_to_all_single(rows.view(-1), copies, group=self._group, async_op=True)
            return _under_way(work, rows, copies)
        return _under_way(dist.all_gather(list(rows), own, group=self._group, async_op=True), rows, own)

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
        work = dist.all_to_all_single(parts, own, received, splits, self._group, async_op=True)
        return _under_way(work, parts, own, stays=isinstance(message, torch.Tensor))

    def send_and_receive(
        self, outgoing: dict[int, np.ndarray | torch.Tensor], incoming: dict[int, int]
    ) -> dict[int, np.ndarray]:
        sent = {rank: self._tensor(payload) for rank, payload in outgoing.items()}
        buffers = {rank: torch.empty(size, dtype=torch.uint8, device=self._device) for rank, size in incoming.items()}
        operations = [
            dist.P2POp(operation, tensor, dist.get_global_rank(self._group, rank), self._group)
            for operation, tensors in ((dist.isend, sent), (dist.irecv, buffers))
            for rank, tensor in tensors.items()
        ]
        for work in dist.batch_isend_irecv(operations) if operations else ():
            work.wait()
        return {rank: buffer.cpu().numpy() for rank, buffer in buffers.items()}


def _under_way(work, result: torch.Tensor, *sent: torch.Tensor, stays: bool = False) -> CollectiveHandle:
    """sent: alive until it has left. stays: whether the result is a tensor, where it is."""

    def wait():
        work.wait()
        sent  # noqa: B018
        return result if stays else result.cpu().numpy()

    return CollectiveHandle(wait)


def own_transport(
    process_group: dist.ProcessGroup | None,
    backend: str | None,
    timeout: datetime.timedelta | None,
    expected: dist.ProcessGroup | None = None,
) -> GroupTransport:
    """Over a group of the same ranks that nobody else uses. expected: the group if none was given."""
    if not dist.is_initialized():
        raise ConfigError("torch.distributed is not initialized: call torch.distributed.init_process_group() first")
    process_group = expected if process_group is None else process_group
    if dist.get_rank(process_group) < 0:
        raise ConfigError("this rank does not belong to process_group")
    wait_at_exit()
    backend = backend or dist.get_backend(process_group)
    if process_group in (None, dist.group.WORLD):
        group = dist.new_group(backend=backend, timeout=timeout)
    else:
        group = _group_within(process_group, backend, timeout)
    on_nccl = backend == "nccl"
    return GroupTransport(group, torch.device("cuda", torch.cuda.current_device()) if on_nccl else torch.device("cpu"))


def _group_within(process_group: dist.ProcessGroup, backend: str, timeout: datetime.timedelta | None) -> dist.ProcessGroup:
    """A new group of another one's ranks; the other ranks of the job need not know of it.

    torch.distributed names such a group by the number of groups that this rank has made. Ranks that have made different
    numbers of them would wait for each other for ever (pytorch/pytorch#173608; torch 2.13), so all take a name of the first.
    """
    name = [uuid.uuid4().hex]
    dist.broadcast_object_list(name, dist.get_global_rank(process_group, 0), process_group)
    # A torch that names groups in another way takes no notice.
    with mock.patch.object(distributed_c10d, "_hash_ranks_to_str", lambda ranks: name[0], create=True):
        return dist.new_group(dist.get_process_group_ranks(process_group), timeout, backend, use_local_synchronization=True)
