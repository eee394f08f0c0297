"""Groups of torch.distributed of our own."""

import datetime
import uuid
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from grace_ext import ConfigError

from .gloo_exit import wait_at_exit


def own_group(process_group: dist.ProcessGroup | None, backend: str | None, timeout: datetime.timedelta | None) -> tuple:
    """(a group of the same ranks that nobody else uses, where its tensors live)."""
    if not dist.is_initialized():
        raise ConfigError("torch.distributed is not initialized: call torch.distributed.init_process_group() first")
    if dist.get_rank(process_group) < 0:
        raise ConfigError("this rank does not belong to process_group")
    wait_at_exit()
    backend = backend or dist.get_backend(process_group)
    if process_group in (None, dist.group.WORLD):
        group = dist.new_group(backend=backend, timeout=timeout)
    else:
        group = _group_within(process_group, backend, timeout)
    return group, torch.device("cuda", torch.cuda.current_device()) if backend == "nccl" else torch.device("cpu")


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
