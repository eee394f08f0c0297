"""A job in which one rank raises: failing.py WHERE, in the user's code or inside the exchange's worker thread."""

import sys

import horovod.torch as hvd
import torch
from grace_ext.adapters.horovod_torch import DistributedOptimizer

hvd.init()
torch.set_num_threads(1)
net = torch.nn.Linear(300, 300)
optimizer = DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=0.1), net.named_parameters())
for step in range(20):
    if step == 5 and hvd.rank() == 1:
        if sys.argv[1] == "user":
            raise RuntimeError("rank 1 gives up")
        for bucket in optimizer._grace.exchange.buckets:
            bucket.start = None  # calling it raises in the worker thread
    optimizer.zero_grad()
    net(torch.randn(4, 300)).sum().backward()
    optimizer.step()
print("this line must not be reached")
