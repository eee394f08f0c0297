"""A job in which rank 1 raises: failing.py WHERE [BACKEND], in the user's code, inside the exchange's worker thread, or in the user's
code while rank 0 is stuck (stopped by a signal) and cannot take part in Horovod's shutdown."""

import os
import signal
import sys
import time
from pathlib import Path

import horovod.torch as hvd
import torch

from grace_ext.adapters.horovod_torch import DistributedOptimizer

hvd.init()
torch.set_num_threads(1)
net = torch.nn.Linear(300, 300)
backend = sys.argv[2] if sys.argv[2:] else None
optimizer = DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=0.1), net.named_parameters(), backend=backend)
rank_0 = Path(f"/proc/{hvd.broadcast_object(os.getpid(), root_rank=0, name='pid')}/stat")
for step in range(20):
    if step == 5 and hvd.rank() == 1:
        if sys.argv[1] != "worker":
            while sys.argv[1] == "stuck" and rank_0.read_text().rpartition(")")[2].split()[0] != "T":
                time.sleep(0.01)
            raise RuntimeError("rank 1 gives up")
        for bucket in optimizer._grace.exchange.buckets:
            bucket.start = None  # calling it raises in the worker thread
    if step == 5 and hvd.rank() == 0 and sys.argv[1] == "stuck":
        os.kill(os.getpid(), signal.SIGSTOP)
    optimizer.zero_grad()
    net(torch.randn(4, 300)).sum().backward()
    optimizer.step()
print("this line must not be reached")
