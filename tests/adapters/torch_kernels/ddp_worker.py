"""A rank of a training with DDP whose tensors of the CPU take the way of a GPU's, with kernels in Triton's interpreter."""

import os
import sys
from unittest import mock

import torch
import torch.distributed as dist
import training

from grace_ext.adapters._torch.device_rows import DeviceRowBucket
from grace_ext.adapters._torch.factor_bucket import FactorBucket
from grace_ext.adapters._torch.kernel_bucket import KernelBucket
from grace_ext.adapters.torch_ddp import CompressionState, comm_hook


def train(spec: str, selection: str) -> torch.Tensor:
    """spec: "adam" for an AdamW and its default, "onebit_adam" for that memory, "rows" for a model with a table."""
    net = training.network(with_table=spec == "rows", hidden=300 if spec.startswith("topk") else 60)
    model = torch.nn.parallel.DistributedDataParallel(net)
    if spec == "adam":
        optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
        state = CompressionState(net.named_parameters(), optimizer=optimizer, selection=selection)
    elif spec == "onebit_adam":
        optimizer = torch.optim.Adam(net.parameters(), lr=1e-3, weight_decay=0.01)
        options = {"memory": "onebit_adam:2", "optimizer": optimizer, "selection": selection}
        state = CompressionState(net.named_parameters(), "dense/onebit", **options)
    else:
        optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
        chosen = "topk:0.1/rice/qsgd:7" if spec == "rows" else spec
        state = CompressionState(net.named_parameters(), chosen, memory="residual", selection=selection)
    model.register_comm_hook(state, comm_hook)
    with mock.patch.object(KernelBucket, "_joined", autospec=True, side_effect=KernelBucket._joined) as parts:
        training.train(model, optimizer)
    in_place = [len(call.args[1]) for call in parts.call_args_list]  # tensors of a bucket that kernels read where they lie
    tensors = {"topk:0.02/rice/qsgd:7": 2, "rows": 1}.get(spec, 0) if selection == "device" else 0
    assert in_place == ([tensors] * 4 if tensors else []), in_place
    kinds = {type(bucket) for bucket in state._buckets.exchange.buckets}
    kind = {"powersgd:2": FactorBucket, "rows": DeviceRowBucket}.get(spec, KernelBucket)
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
