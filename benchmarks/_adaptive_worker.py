"""One rank of a job of benchmarks/adaptive.py: _adaptive_worker.py OPTIONS, with the options as JSON.

It trains until it is stopped, and writes a line per step to rankN.steps in the folder options["out"]: when the step ended,
how long it took, and the bytes that this rank has handed to collectives so far.
"""

import json
import os
import sys
import time

import horovod.torch as hvd
import torch
from _cluster_tasks import TASKS

from grace_ext.adapters.horovod_torch import DistributedOptimizer


def main() -> None:
    options = json.loads(sys.argv[1])
    hvd.init()
    torch.set_num_threads(1)
    torch.manual_seed(1)
    task = TASKS["mlp"]
    task.load(options["data"])
    model = task.build()
    optimizer = DistributedOptimizer(task.optimizer(model.parameters()), model.named_parameters(), **options["arguments"])
    generator = torch.Generator().manual_seed(hvd.rank())
    with open(os.path.join(options["out"], f"rank{hvd.rank()}.steps"), "w") as file:
        while True:
            started = time.time()
            optimizer.zero_grad()
            task.loss(model, task.batch(generator)).backward()
            optimizer.step()
            print(time.time(), time.time() - started, optimizer.compression_stats()["bytes_out"], file=file, flush=True)


main()
