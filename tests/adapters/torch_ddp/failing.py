"""A job in which rank 1 raises: failing.py WHERE, in the user's code, inside the exchange's worker thread, or there
while the user's code goes on; or in which it is "late" and rank 0 does not wait for ever."""

import contextlib
import datetime
import sys
import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import grace_ext
from grace_ext.adapters.torch_ddp import CompressionState, comm_hook
from grace_ext.policy import DEFAULT_SPEC

dist.init_process_group("gloo")
torch.set_num_threads(1)
module = torch.nn.Linear(300, 300)
model = DistributedDataParallel(module)
for _ in range(2):  # what may take long, compiling kernels, is not waiting
    grace_ext.decompress(grace_ext.compressor(DEFAULT_SPEC).compress(torch.randn(90_000).numpy()), size=90_000)
    dist.barrier()
patience = datetime.timedelta(seconds=5) if sys.argv[1] == "late" else None
state = CompressionState(module.named_parameters(), DEFAULT_SPEC, timeout=patience)
model.register_comm_hook(state, comm_hook)
for step in range(20):
    if step == 5 and dist.get_rank() == 1:
        if sys.argv[1] == "user":
            raise RuntimeError("rank 1 gives up")

        if sys.argv[1] == "late":
            time.sleep(10**6)

        def broken(**_):
            raise MemoryError("the encoder of rank 1 broke")

        state._buckets.exchange.buckets[0].start = broken
    caught = contextlib.suppress(RuntimeError) if sys.argv[1] == "caught" and step == 5 else contextlib.nullcontext()
    with caught:
        model(torch.randn(4, 300)).sum().backward()
        print(f"backward of step {step} went well", flush=True)
print("this line must not be reached")
