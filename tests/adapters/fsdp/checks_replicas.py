"""What is checked inside the ranks of one job: replicas of a sharded model that exchange slices in containers."""

import torch
import torch.distributed as dist
from models import assert_same, loss_of, own, sharded, train
from support.checking import check, check_under_every_launcher, raises
from torch.distributed.device_mesh import init_device_mesh

from grace_ext import ConfigError
from grace_ext.adapters.fsdp import CompressedReduceScatter, CompressedReplicas


def meshes():
    """Two replicas."""
    return init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("replicate", "shard"))


def same_in_replicas(net, replicas):
    for name, p in own(net).items():
        rows = [torch.empty_like(p) for _ in range(2)]
        dist.all_gather(rows, p, replicas.get_group())
        assert torch.equal(*rows), name


@check_under_every_launcher
def exact_replicas_train_as_hybrid_sharding_does():
    mesh = meshes()
    expected, net = sharded(mesh), sharded(mesh["shard"])
    compression = CompressedReplicas(net, mesh["replicate"], "dense/raw")
    train(expected, 4)
    train(net, 4)
    for name, p in own(net).items():
        torch.testing.assert_close(p, own(expected)[name], rtol=1e-4, atol=1e-5)
    assert compression.compression_stats()["steps"] == 4


@check_under_every_launcher
def replicas_keep_the_same_parameters():
    mesh = meshes()
    for communicator in ("allgather", "sharded", "hierarchical", "auto"):
        net = sharded(mesh["shard"])
        with torch.no_grad():
            for p in net.parameters():
                p.to_local().add_(dist.get_rank(mesh["replicate"].get_group()))  # the first replica's are to win
        CompressedReplicas(net, mesh["replicate"], "topk:0.05/rice/qsgd:7", communicator=communicator)
        same_in_replicas(net, mesh["replicate"])
        before = own(net)
        train(net, 3)
        same_in_replicas(net, mesh["replicate"])
        assert any(not torch.equal(before[name], p) for name, p in own(net).items())


@check_under_every_launcher
def both_halves_compressed():
    mesh = meshes()
    net = sharded(mesh["shard"])
    slices = CompressedReduceScatter(net)
    replicas = CompressedReplicas(net, mesh["replicate"])
    train(net, 3)
    same_in_replicas(net, mesh["replicate"])
    assert replicas.compression_stats()["steps"] == 3
    assert slices.ranks == dist.get_world_size() // 2


@check
def a_replica_that_is_not_finite_changes_no_memory():
    mesh = meshes()
    net = sharded(mesh["shard"])
    compression = CompressedReplicas(net, mesh["replicate"], "topk:0.05/rice/qsgd:7")
    optimizer = train(net, 2)
    before = compression.state_dict()[f"rank{compression.rank}"]["residual"]
    (loss_of(net, dist.get_rank(), 2) * (torch.nan if dist.get_rank() == 0 else 1)).backward()
    assert_same(before, compression.state_dict()[f"rank{compression.rank}"]["residual"])
    optimizer.zero_grad()
    train(net, 1, optimizer, 3)


@check
def replicas_must_hold_the_same_slice():
    mesh = meshes()
    with raises(ConfigError, "allowed: one rank in common"):
        CompressedReplicas(sharded(), dist.group.WORLD)
    with raises(ConfigError, "replicas is a mesh of 2 dimensions"):
        CompressedReplicas(sharded(mesh["shard"]), mesh)
