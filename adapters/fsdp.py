"""Compressed gradients for fully_shard (FSDP2), and between the replicas of hybrid sharding.

for block in model.blocks: fully_shard(block)
fully_shard(model)
compression = CompressedReduceScatter(model)
"""

import datetime
import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from grace_ext import ConfigError
from grace_ext.communicators.reduce_scatter import ReduceScatter
from grace_ext.exchange.buckets import Bucket, Tensor
from grace_ext.memory.residual import Residual
from grace_ext.pipeline.compressor import Compressor

from ._common.options import CompressionOptions
from ._torch.ddp_transport import own_transport
from ._torch.group_exchange import GroupExchange
from ._torch.module_parameters import take_from_first
from ._torch.parameter_groups import ParameterGroup, parameter_groups

__all__ = ["CompressedReduceScatter", "CompressedReplicas", "CompressionOptions"]


class _Options(CompressionOptions):
    absent = ("bucket_bytes", "groups", "on_resize", "schedule")


class _ScatterOptions(CompressionOptions):
    absent = (*_Options.absent, "communicator")


class CompressedReduceScatter(GroupExchange):
    """Compresses the reduce-scatter of a sharded model's gradients.

    In its place, each rank sends every other one the container of that rank's slice, and adds up what it gets for its own,
    which itself stays exact: 16 / 4.06 times fewer bytes than bfloat16 with the default. What a container leaves out is in
    the sender's residual. Where some rank's gradient of a group is not finite, the result of the group is not finite on all
    ranks, and no rank's memory changes in this step. Gradients that are accumulated without synchronization
    (set_requires_gradient_sync), gradients of any dtype (reduce_dtype), offloaded ones and hybrid sharding are as without it.
    It is as synchronous as Gloo's own reduce-scatter on a CPU. On an accelerator, most specs are encoded and summed there.

    Args:
        model: The model, after all calls of fully_shard. Which parameters require gradients is decided now. All ranks of a
            group need gradients of all of them: call model.set_reduce_scatter_unused_params(True) where some are not used.
        compression: The spec of each slice of each group of parameters that fully_shard was called for. Rules know groups by
            the name of their module ("blocks.0", "model").
        memory: "residual" with its options, or "none". With bits=8, a residual takes a byte for each gradient that is sent
            to other ranks; of those of its own slice, a rank keeps none.
        backend: See CompressionState of grace_ext.adapters.torch_ddp.
        timeout: See CompressionState of grace_ext.adapters.torch_ddp.
        **options: All others of CompressionOptions but communicator, bucket_bytes, groups, on_resize and schedule.

    Raises:
        ConfigError: Nothing is sharded, parameters are sharded in several dimensions, ranks differ, or options do not fit.
        TypeError: An option is unknown.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        compression: str | dict | Compressor = "dense/qsgd:4",
        *,
        memory: str | dict | Residual = "residual:bits=8",
        backend: str | None = None,
        timeout: datetime.timedelta | None = None,
        **options: Any,
    ):
        chosen = _ScatterOptions.from_keywords(options, compression=compression, memory=memory)
        groups = parameter_groups(model)
        transport = own_transport(groups[0].ranks, backend, timeout)
        super().__init__(model, groups, transport, chosen, f"grace_ext.{transport.group_name}.slices")
        for number, group in enumerate(groups if self.ranks > 1 else ()):
            for module in group.modules:
                _setter(module, "set_custom_reduce_scatter")(_ReduceScatterOfGroup(self, number))

    def _make_bucket(self, name: str, group: ParameterGroup, compressor: Compressor) -> Bucket:
        """Its tensors are the slices of the other ranks. Their common names are the same on all ranks."""
        owners = [rank for rank in range(self.ranks) if rank != self.rank]
        tensors = [
            Tensor(f"{group.name}@{owner}", group.size, 2, group.device, common_name=f"{group.name}@{position}")
            for position, owner in enumerate(owners)
        ]
        return Bucket(name, tensors, compressor, ReduceScatter(), self._memory_of(group).for_compressor(compressor))

    def _reduce(self, number: int, output: torch.Tensor, source: torch.Tensor, op: Any) -> None:
        group = self._groups[number]
        unit = self._begin(number)
        if op not in (dist.ReduceOp.AVG, dist.ReduceOp.SUM):
            raise self._failed(
                ConfigError(
                    f"{group.name!r}: reduce operation {op}; allowed: AVG and SUM. With set_gradient_divide_factor, call "
                    f"set_force_sum_reduction_for_comms(True), too"
                )
            )
        if source.numel() != self.ranks * group.size:  # maybe on this rank only
            raise self._failed(
                ConfigError(
                    f"{group.name!r}: {source.numel()} elements of gradients, not {self.ranks * group.size}: some parameters "
                    f"have no gradient, or others require gradients than before; call "
                    f"model.set_reduce_scatter_unused_params(True), or make CompressedReduceScatter anew"
                )
            )
        slices = self._placed(number, source).view(self.ranks, -1)
        own = slices[self.rank] / unit
        is_finite = bool(torch.isfinite(own).all())

        def pack(flat: torch.Tensor) -> None:
            torch.cat([slices[: self.rank].flatten(), slices[self.rank + 1 :].flatten()], out=flat)
            if not is_finite:  # the others have to know
                flat.fill_(torch.nan)
            elif unit != 1:
                flat.div_(unit)

        self._run(number, pack, own)
        output.copy_(own.mul_(unit / (self.ranks if op == dist.ReduceOp.AVG else 1)))


class CompressedReplicas(GroupExchange):
    """Averages the sharded gradients of replicas by any spec: hybrid sharding whose second half is compressed.

    Each replica of the model is sharded over ranks of its own, such as those of a host, with a mesh of one dimension; what
    its reduce-scatter gives is then averaged over the ranks that have the same slice in other replicas. (On a mesh of two
    dimensions, fully_shard makes that average itself, in a way that cannot be replaced.)

        mesh = init_device_mesh("cpu", (hosts, ranks), mesh_dim_names=("replicate", "shard"))
        fully_shard(model, mesh=mesh["shard"])
        CompressedReplicas(model, mesh["replicate"], "topk:0.01/rice/qsgd:7")

    All replicas get the parameters of the first.

    Args:
        model: The model, after all calls of fully_shard. See CompressedReduceScatter.
        replicas: The ranks that have the same slice: a process group, or a mesh of one dimension.
        compression: The spec of each group's slice.
        memory: "residual" with its options, or "none".
        backend: See CompressionState of grace_ext.adapters.torch_ddp.
        timeout: See CompressionState of grace_ext.adapters.torch_ddp.
        **options: All others of CompressionOptions but bucket_bytes, groups, on_resize and schedule.

    Raises:
        ConfigError: Nothing is sharded, replicas are a mesh of several dimensions, ranks differ, or options do not fit.
        TypeError: An option is unknown.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        replicas: dist.ProcessGroup | DeviceMesh,
        compression: str | dict | Compressor = "topk:0.01/rice/qsgd:7",
        *,
        memory: str | dict | Residual = "residual",
        backend: str | None = None,
        timeout: datetime.timedelta | None = None,
        **options: Any,
    ):
        if isinstance(replicas, DeviceMesh):
            if replicas.ndim != 1:
                raise ConfigError(f"replicas is a mesh of {replicas.ndim} dimensions; allowed: one")
            replicas = replicas.get_group()
        chosen = _Options.from_keywords(options, compression=compression, memory=memory)
        groups = parameter_groups(model)
        for group in groups:
            shared = set(dist.get_process_group_ranks(group.ranks)) & set(dist.get_process_group_ranks(replicas))
            if len(shared) != 1:
                raise ConfigError(
                    f"{group.name!r} is sharded over ranks {dist.get_process_group_ranks(group.ranks)}, and its replicas are "
                    f"on ranks {dist.get_process_group_ranks(replicas)}; allowed: one rank in common, this one"
                )
        transport = own_transport(replicas, backend, timeout)
        prefix = f"grace_ext.{transport.group_name}.replicas"
        self._communicator = chosen.make_communicator()
        super().__init__(model, groups, transport, chosen, prefix, 1 / transport.size)
        if self.ranks == 1:
            return
        local = {name: p.to_local() if isinstance(p, DTensor) else p for name, p in model.named_parameters()}
        take_from_first(transport, prefix, local | dict(model.named_buffers()))
        for number, group in enumerate(groups):
            for module in group.modules:
                _setter(module, "set_all_reduce_hook")(functools.partial(self._reduce, number))

    def _make_bucket(self, name: str, group: ParameterGroup, compressor: Compressor) -> Bucket:
        return self._exchange.bucket(name, [Tensor(group.name, group.size, 2, group.device)], compressor, self._communicator)

    def _reduce(self, number: int, output: torch.Tensor) -> None:
        unit = self._begin(number)
        own = self._placed(number, output)
        result = torch.empty_like(own)

        def pack(flat: torch.Tensor) -> None:
            torch.div(own, unit, out=flat)

        self._run(number, pack, result)
        output.copy_(result.mul_(unit))


def _setter(module: FSDPModule, name: str) -> Callable:
    """A method by which fully_shard takes something of ours. Raises ConfigError where torch has none yet."""
    method = getattr(module, name, None)
    if method is None:
        raise ConfigError(f"torch {torch.__version__} has no FSDPModule.{name}; this adapter was run with torch 2.13")
    return method


class _ReduceScatterOfGroup:
    """What fully_shard calls in the place of its own reduce-scatter (torch.distributed.fsdp's ReduceScatter)."""

    def __init__(self, compression: CompressedReduceScatter, number: int):
        self._compression, self._number = compression, number

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> None:
        self._compression._reduce(self._number, output_tensor, input_tensor, op)
