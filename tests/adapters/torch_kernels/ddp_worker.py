"""A rank of a training with DDP whose tensors of the CPU take the way of a GPU's, with kernels in Triton's interpreter."""

import os
import sys

import torch
import torch.distributed as dist
import training

from grace_ext.adapters._torch.factor_bucket import FactorBucket
from grace_ext.adapters._torch.kernel_bucket import KernelBucket
from grace_ext.adapters.torch_ddp import CompressionState, comm_hook


def train(spec: str, selection: str) -> torch.Tensor:
    """spec: "adam" for an AdamW and its default."""
    net = training.network()
    model = torch.nn.parallel.DistributedDataParallel(net)
    if spec == "adam":
        optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
        state = CompressionState(net.named_parameters(), optimizer=optimizer, selection=selection)
    else:
        optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
        state = CompressionState(net.named_parameters(), spec, memory="residual", selection=selection)
    model.register_comm_hook(state, comm_hook)
    training.train(model, optimizer)
    kinds = {type(bucket) for bucket in state._buckets.exchange.buckets}
    kind = FactorBucket if spec.startswith("powersgd") else KernelBucket
    assert (kind in kinds) == (selection == "device"), kinds
    return torch.cat([p.detach().flatten() for p in net.parameters()])


dist.init_process_group("gloo")
torch.set_num_threads(1)
for spec in sys.argv[1:]:
    # What is summed of low-rank factors is multiplied by torch on one and by numpy on the other.
    tolerance = {"rtol": 0, "atol": 1e-5 if spec.startswith("powersgd") else 0}
    torch.testing.assert_close(train(spec, "device"), train(spec, "host"), **tolerance)
    print(f"rank {dist.get_rank()}: {spec} is the same", flush=True)
dist.destroy_process_group()
os._exit(0)
