"""One rank of a job that benchmarks/faults.py disturbs: _faults_worker.py FOLDER. It trains until it is stopped.

It writes a line per step to rankN.steps, when the step ended and how long it took, and to rankN.error when and what was
raised.
"""

import json
import os
import sys
import time
import traceback

import horovod.torch as hvd
import torch

from grace_ext.adapters.horovod_torch import DistributedOptimizer


def train(file) -> None:
    torch.manual_seed(1)
    net = torch.nn.Sequential(torch.nn.Linear(784, 1024), torch.nn.ReLU(), torch.nn.Linear(1024, 10))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    optimizer = DistributedOptimizer(optimizer, net.named_parameters())
    data = torch.Generator().manual_seed(hvd.rank())
    while True:
        started = time.time()
        optimizer.zero_grad()
        output = net(torch.randn(16, 784, generator=data))
        torch.nn.functional.cross_entropy(output, torch.randint(0, 10, (16,), generator=data)).backward()
        optimizer.step()
        print(time.time(), time.time() - started, file=file, flush=True)


def main() -> None:
    hvd.init()
    torch.set_num_threads(1)
    path = os.path.join(sys.argv[1], f"rank{hvd.rank()}")
    with open(path + ".pid", "w") as file:
        print(os.getpid(), file=file)
    try:
        with open(path + ".steps", "w") as file:
            train(file)
    except BaseException as error:
        with open(path + ".error", "w") as file:
            json.dump({"at": time.time(), "error": "".join(traceback.format_exception_only(error)).strip()}, file)
        raise


main()
