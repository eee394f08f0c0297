"""A job in which backward() raises in the middle of the second step: failing_backward.py WHO, on "all" ranks or on the
"first" alone. Buckets are under way then that are fused with some that never start."""

import sys
import time

import horovod.torch as hvd
import torch

from grace_ext.adapters.horovod_torch import DistributedOptimizer

hvd.init()
torch.set_num_threads(1)
net = torch.nn.Sequential(*(torch.nn.Linear(48, 48, bias=False) for _ in range(6)))
optimizer = DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=0.01), net.named_parameters(), bucket_bytes=1)
assert len(optimizer._grace.exchange.buckets) == 6


def fail(_):
    time.sleep(1)  # the worker has encoded what there is, and looks for what has arrived
    raise RuntimeError("backward gives up")


for step in range(20):
    optimizer.zero_grad()
    hidden = net[:3](torch.randn(4, 48))
    if step == 1 and (sys.argv[1] == "all" or hvd.rank() == 0):
        hidden.register_hook(fail)
    net[3:](hidden).sum().backward()
    optimizer.step()
print("this line must not be reached")
