"""leaving.py FOLDER: rank 1 shuts Horovod down while collectives of rank 0 are under way, and no thread of rank 0 gets
Python's interpreter lock before that is over."""

import ctypes
import fcntl
import sys
import time
from pathlib import Path

import horovod.torch as hvd
import numpy as np
import torch

from grace_ext.adapters.horovod_torch import DistributedOptimizer

FOLDER = Path(sys.argv[1])
hvd.init()
net = torch.nn.Linear(300, 300)
optimizer = DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=0.1), net.named_parameters())
transport, payload = optimizer._grace.exchange.transport, np.zeros(100, np.uint8)
if hvd.rank() == 0:  # and nowhere else, so they never end
    handles = [
        transport.allgather("allgather", payload),
        transport.alltoall("alltoall", payload, [60, 40]),
        transport.allreduce("sum", np.zeros(9, np.float32)),
        transport.sum_tensor("tensor", torch.zeros(9), 1.0, 1.0),
    ]
with (FOLDER / "lock").open("w") as lock:
    if hvd.rank() == 1:
        fcntl.flock(lock, fcntl.LOCK_EX)
        (FOLDER / "locked").touch()
        while not (FOLDER / "waits").exists():
            time.sleep(0.1)
        time.sleep(1)
        hvd.shutdown()
    else:
        while not (FOLDER / "locked").exists():
            time.sleep(0.1)
        (FOLDER / "waits").touch()
        ctypes.PyDLL(None).flock(lock.fileno(), fcntl.LOCK_EX)  # keeps the interpreter lock
        print("shut down without the interpreter lock")
