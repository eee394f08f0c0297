"""One of the jobs of a training that is stopped and goes on: resuming.py FOLDER PHASE.

first: 6 steps; after 3 each rank saves a file, and rank 0 one with everybody's memory. again: the last 3 steps, from the
rank's own file. other: another number of ranks reads rank 0's file. Each phase writes PHASE-rankN.json.
"""

import json
import sys
from pathlib import Path

import horovod.torch as hvd
import torch
from checks_state import Messages, setup, steps
from harness import batches, flat

FOLDER, PHASE = Path(sys.argv[1]), sys.argv[2]
SPEC = "topk:0.01/rice/qsgd:7"


def residuals(memories):
    """Their sum, float64[d]."""
    return sum(torch.cat([memory["residual"][name].double() for name in sorted(memory["residual"])]) for memory in memories)


hvd.init()
torch.set_num_threads(1)
rank = hvd.rank()
net, optimizer = setup(SPEC, inner=torch.optim.Adam, memory="residual:decay=0.9")
data = list(batches(6))
result = {}
if PHASE == "first":
    steps(net, optimizer, data[:3])
    torch.save({"model": net.state_dict(), "optimizer": optimizer.state_dict()}, FOLDER / f"{rank}.pt")
    optimizer.consolidate_state_dict()
    if rank == 0:
        torch.save(optimizer.state_dict(), FOLDER / "all.pt")
    steps(net, optimizer, data[3:])
elif PHASE == "again":
    saved = torch.load(FOLDER / f"{rank}.pt", weights_only=True)
    net.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    steps(net, optimizer, data[3:])
else:
    saved = torch.load(FOLDER / "all.pt", weights_only=True)
    with Messages() as texts:
        optimizer.load_state_dict(saved)
    memories = saved["grace_ext"]["memories"]
    own = residuals([optimizer.state_dict()["grace_ext"]["memories"][rank]])
    summed = hvd.allreduce(own, op=hvd.Sum, name="sum")
    result = {
        "ranks": sorted(memories),
        "log": texts,
        "off": (summed - residuals(memories.values())).abs().max().item(),
        "largest": own.abs().max().item(),
    }
result["weights"] = flat(net).tolist()
(FOLDER / f"{PHASE}-rank{rank}.json").write_text(json.dumps(result))
hvd.shutdown()
