"""A training job for tests: job.py OUT_FOLDER STEPS [SPEC COMMUNICATOR WIDTH BACKEND]. Each rank writes rankN.json: its host, what
the job came to."""

import json
import socket
import sys
import time
from pathlib import Path

import horovod.torch as hvd
import torch

from grace_ext.adapters.horovod_torch import DistributedOptimizer


def train(
    steps: int, progress: Path, spec="topk:0.01/rice/qsgd:7", communicator="allgather", width="400", backend=None
) -> dict:
    torch.manual_seed(1)
    net = torch.nn.Sequential(torch.nn.Linear(100, int(width)), torch.nn.ReLU(), torch.nn.Linear(int(width), 10))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    optimizer = DistributedOptimizer(optimizer, net.named_parameters(), spec, communicator=communicator, backend=backend)
    hvd.broadcast_parameters(net.state_dict(), root_rank=0)
    data = torch.Generator().manual_seed(100 + hvd.rank())
    for step in range(steps):
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(
            net(torch.randn(8, 100, generator=data)), torch.randint(0, 10, (8,), generator=data)
        )
        loss.backward()
        optimizer.step()
        if step == 4:
            progress.touch()
    weights = torch.cat([p.detach().flatten() for p in net.parameters()])
    gathered = hvd.allgather(weights[None], name="weights")
    identical = all(torch.equal(gathered[0], row) for row in gathered)
    return {
        "identical": identical and bool(weights.isfinite().all()),
        "hosts": hvd.allgather_object(socket.gethostname()),
        "transport": type(optimizer._grace.exchange.transport.probe_transport()).__name__,
        "ratio": optimizer.compression_stats()["compressed"]["ratio"],
    }


def main() -> None:
    folder = Path(sys.argv[1])
    hvd.init()
    torch.set_num_threads(1)
    result = folder / f"rank{hvd.rank()}.json"
    host = socket.gethostname()
    try:
        came_to = train(int(sys.argv[2]), folder / f"progress{hvd.rank()}", *sys.argv[3:])
    except BaseException as error:
        result.write_text(json.dumps({"host": host, "error": repr(error), "at": time.time()}))
        raise
    result.write_text(json.dumps({"host": host, **came_to}))


main()
