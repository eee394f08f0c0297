"""The groups of parameters that fully_shard reduces together."""

import dataclasses
import math

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Replicate, Shard

from grace_ext import ConfigError


@dataclasses.dataclass
class ParameterGroup:
    """Parameters whose gradients fully_shard gives to one reduce-scatter.

    name: of its modules in the model, joined by "+"; "model" for the model itself. size: elements of one rank's slice, padding
    included. ranks: the process group that the parameters are sharded over. device: where they are.
    """

    name: str
    modules: list[FSDPModule]
    size: int
    ranks: dist.ProcessGroup
    device: str


def parameter_groups(model: torch.nn.Module) -> list[ParameterGroup]:
    """The groups with parameters that require gradients, in the order of the modules.

    Raises ConfigError where nothing is sharded, where parameters are sharded in more than one dimension, as with tensor
    parallelism, and where groups are sharded over other ranks than others.
    """
    modules: dict[int, list[tuple[str, FSDPModule]]] = {}
    owner: dict[int, int] = {}  # of a parameter: the state of the innermost module that was sharded
    for name, module in model.named_modules():
        if isinstance(module, FSDPModule):
            state = id(module._get_fsdp_state())  # the same for modules that were sharded together
            modules.setdefault(state, []).append((name or "model", module))
            owner.update((id(p), state) for p in module.parameters())
    sharded: dict[int, list[DTensor]] = {state: [] for state in modules}
    for p in model.parameters():
        if isinstance(p, DTensor) and p.requires_grad and id(p) in owner:
            sharded[owner[id(p)]].append(p)
    found = []
    for state, members in modules.items():
        if sharded[state]:
            names, own = zip(*members, strict=True)
            name, first = "+".join(names), sharded[state][0]
            size, device = sum(map(_slice_size, sharded[state])), str(first.to_local().device)
            found.append(ParameterGroup(name, list(own), size, _ranks(name, first), device))
    if not found:
        raise ConfigError("no parameter of the model is sharded: call torch.distributed.fsdp.fully_shard before this")
    if len({tuple(dist.get_process_group_ranks(group.ranks)) for group in found}) > 1:
        raise ConfigError("parts of the model are sharded over different ranks; allowed: one mesh for all of them")
    return found


def _shard_dimension(p: DTensor) -> int:
    """The dimension of the mesh that the parameter is sharded over, -1 if there are several or none."""
    kinds = [type(placement) for placement in p.placements]
    sharded = [i for i, kind in enumerate(kinds) if kind is Shard]
    return sharded[0] if len(sharded) == 1 and all(kind in (Shard, Replicate) for kind in kinds) else -1


def _ranks(name: str, p: DTensor) -> dist.ProcessGroup:
    dimension = _shard_dimension(p)
    if dimension < 0:
        raise ConfigError(
            f"a parameter of {name!r} has placements {p.placements}; allowed: sharded in one dimension of the mesh, as by "
            f"fully_shard alone, and replicated in the others"
        )
    return p.device_mesh.get_group(dimension)


def _slice_size(p: DTensor) -> int:
    placement = p.placements[_shard_dimension(p)]
    ranks = p.device_mesh.size(_shard_dimension(p))
    length = p.shape[placement.dim]
    return math.ceil(length / ranks) * (p.numel() // length)
