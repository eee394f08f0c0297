"""A rank of a training with fully_shard whose tensors of the CPU take the way of a GPU's, with kernels in Triton's interpreter."""

import os
import sys

import torch
import torch.distributed as dist
from support.interpreter import patch_once
from torch.distributed.fsdp import fully_shard

from grace_ext.adapters._torch.device_training import make_steps, network
from grace_ext.adapters._torch.kernel_bucket import KernelBucket
from grace_ext.adapters.fsdp import CompressedReduceScatter

patch_once()


def train(spec: str, memory: str, selection: str) -> torch.Tensor:
    net = network()
    fully_shard(net[0])
    fully_shard(net)
    compression = CompressedReduceScatter(net, spec, memory=memory, selection=selection)
    kinds = {type(bucket) for bucket in compression._exchange.buckets}
    assert (KernelBucket in kinds) == (selection == "device"), kinds
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    make_steps(net, optimizer)
    kept = compression.state_dict()[f"rank{dist.get_rank()}"]["residual"].values()
    return torch.cat([*(p.detach().to_local().flatten() for p in net.parameters()), *kept])


dist.init_process_group("gloo")
torch.set_num_threads(1)
for given in sys.argv[1:]:
    spec, memory = given.split("+")
    torch.testing.assert_close(train(spec, memory, "device"), train(spec, memory, "host"), rtol=0, atol=0)
    print(f"rank {dist.get_rank()}: {given} is the same", flush=True)
dist.destroy_process_group()
os._exit(0)
