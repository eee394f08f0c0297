"""A rank of a training with DDP whose tensors of the CPU take the way of a GPU's, with kernels in Triton's interpreter."""

import os
import sys
from unittest import mock

import torch
import torch.distributed as dist
from support.interpreter import patch_once

from grace_ext.adapters._torch.device_rows import DeviceRowBucket
from grace_ext.adapters._torch.device_training import train
from grace_ext.adapters._torch.factor_bucket import FactorBucket
from grace_ext.adapters._torch.kernel_bucket import KernelBucket

patch_once()


def parameters_of(spec: str, selection: str) -> torch.Tensor:
    """Train, and check which way gradients went."""
    with mock.patch.object(KernelBucket, "_joined", autospec=True, side_effect=KernelBucket._joined) as parts:
        parameters, state = train(spec, selection)
    in_place = [len(call.args[1]) for call in parts.call_args_list]  # tensors of a bucket that kernels read where they lie
    tensors = {"topk:0.02/rice/qsgd:7": 2, "rows": 1}.get(spec, 0) if selection == "device" else 0
    assert in_place == ([tensors] * 4 if tensors else []), in_place
    kinds = {type(bucket) for bucket in state._buckets.exchange.buckets}
    kind = {"powersgd:2": FactorBucket, "rows": DeviceRowBucket}.get(spec, KernelBucket)
    assert (kind in kinds) == (selection == "device"), kinds
    return parameters


dist.init_process_group("gloo")
torch.set_num_threads(1)
for spec in sys.argv[1:]:
    # What is summed of low-rank factors is multiplied by torch on one and by numpy on the other.
    tolerance = {"rtol": 0, "atol": 1e-5 if spec.startswith("powersgd") else 0}
    torch.testing.assert_close(parameters_of(spec, "device"), parameters_of(spec, "host"), **tolerance)
    print(f"rank {dist.get_rank()}: {spec} is the same", flush=True)
dist.destroy_process_group()
os._exit(0)
