"""The collectives of grace_ext over torch.distributed."""

import datetime
import uuid
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from grace_ext import ConfigError
from grace_ext.transport import CollectiveHandle

from .c10d_transport import C10dTransport
from .gloo_exit import wait_at_exit


class GroupTransport(C10dTransport):
    """Over a process group of torch.distributed."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device):
        """device: where the group's backend wants tensors to be."""
        super().__init__(dist.get_rank(group), dist.get_world_size(group), dist.get_rank(), device)
        self.group = group
        #: Ranks of the job, in the order of the group's.
        self.members: list[int] = dist.get_process_group_ranks(group)
        self.group_name: str = group.group_name

    def _start_pairs(self, sent: dict[int, torch.Tensor], buffers: dict[int, torch.Tensor]) -> list[CollectiveHandle]:
        if self.message_device is None:
            return super()._start_pairs(sent, buffers)
        operations = [  # NCCL wants them all at once
            dist.P2POp(operation, tensor, self.members[rank], self.group)
            for operation, tensors in ((dist.isend, sent), (dist.irecv, buffers))
            for rank, tensor in tensors.items()
        ]
        return [CollectiveHandle(work.wait) for work in dist.batch_isend_irecv(operations)] if operations else []


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
