"""A worker of an elastic job: train.py FOLDER [STEPS]. FOLDER/hosts says which hosts there are; with STEPS, nothing happens.

The job starts with three workers on two hosts, and something happens every 20 steps: the worker of the second host is
stopped, so that another one of this machine kills it; a third host is added, with two workers; one of these kills itself
while a fourth host takes the place of the third; the fourth host is removed.

Four models are trained at once: one for each thing that memories are to do then, and one in rounds of local steps.
"""

import json
import logging
import os
import signal
import sys
import time
from pathlib import Path

import horovod.torch as hvd
import torch

from grace_ext.adapters.horovod_torch import DistributedOptimizer
from grace_ext.adapters.local_steps import LocalSteps

FOLDER = Path(sys.argv[1])
STEPS = int(sys.argv[2]) if len(sys.argv) > 2 else None
KINDS = {"redistribute": {"on_resize": None}, "reset": {"on_resize": "reset"}, "ef21": {"memory": "ef21"}}

logging.basicConfig(format="%(name)s: %(message)s")
hvd.init()
torch.set_num_threads(1)
torch.manual_seed(1)
teacher = torch.nn.Linear(64, 10)


def make():
    torch.manual_seed(os.getpid())  # a new worker knows nothing
    net = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 20))
    return net, torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-3)


nets, optimizers = {}, {}
for kind, options in KINDS.items():
    nets[kind], inner = make()
    optimizers[kind] = DistributedOptimizer(
        inner, nets[kind].named_parameters(), "topk:0.2/rice/raw", bucket_bytes=10_000, **options
    )
nets["local"], inner = make()
local = LocalSteps(
    nets["local"], inner, steps=6, compression="topk:0.2/rice/raw", memory="residual", outer="nesterov:0.7:momentum=0.5"
)
SIZE = sum(p.numel() for p in nets["reset"].parameters() if p.dim() > 1)  # of what is compressed


def memory(kind, field):
    memories = optimizers[kind].state_dict()["grace_ext"]["memories"]
    fields = memories.get(hvd.rank(), {}).get(field, {})
    return torch.cat([fields[name].flatten() for name in ("0.weight", "2.weight")]) if fields else torch.zeros(SIZE)


def gradient(kind):
    return torch.cat([p.grad.flatten() for p in nets[kind].parameters() if p.dim() > 1])


def total(tensor, name):
    return hvd.allreduce(tensor, op=hvd.Sum, name=name)


kept = {kind: torch.zeros(SIZE) for kind in KINDS}  # this rank's residuals at the last commit


def synchronize_and_check(kind):
    """Of residuals: how much their sum is off if the earlier ones were kept, and if they start from zero. Of ef21: how far
    the aggregate is from the mean of the estimates, and how large that is."""
    before, added = total(kept[kind], f"{kind}.kept"), total(gradient(kind), f"{kind}.added")
    optimizers[kind].synchronize()
    if kind == "ef21":
        mean = total(memory(kind, "estimate"), "estimates") / hvd.size()
        return [(mean - memory(kind, "aggregate")).abs().max().item(), mean.abs().max().item()]
    new = added - gradient(kind) * hvd.size() - total(memory(kind, "residual"), f"{kind}.after")
    return [(before + new).abs().max().item(), new.abs().max().item()]


def step_locally(x, y):
    inner.zero_grad()
    torch.nn.functional.cross_entropy(nets["local"](x), y).backward()
    inner.step()
    local.step()


def identical_on_all_ranks(net):
    weights = torch.cat([p.detach().flatten() for p in net.parameters()])
    return all(torch.equal(row, weights) for row in hvd.allgather(weights[None], name="weights"))


def hosts(*lines):
    if hvd.rank() == 0:
        (FOLDER / "new").write_text("\n".join(lines))
        (FOLDER / "new").rename(FOLDER / "hosts")


def happen(visited, here):
    """What is to happen after `here` steps with the last of these numbers of ranks. Returns whether training ends."""
    if STEPS:
        return here == STEPS
    host, local_rank = os.environ["HOROVOD_HOSTNAME"], hvd.local_rank()
    if here == 20 and visited == [3] and host == "127.0.0.1":
        os.kill(os.getpid(), signal.SIGSTOP)
    if here == 20 and visited == [3, 2]:
        hosts("localhost:2", "127.1:2")
    if here == 20 and visited == [3, 2, 4]:
        hosts("localhost:2", "127.0.1:2")
        if (host, local_rank) == ("127.1", 1):
            os.kill(os.getpid(), signal.SIGKILL)
    if here == 20 and visited == [3, 2, 4, 4]:
        hosts("localhost:2")
    if here > 20:
        time.sleep(0.2)  # until the ranks change
    return here == 20 and len(visited) == 5


def batch(step, rank, size=32):
    x = torch.randn(size, 64, generator=torch.Generator().manual_seed(1000 * step + rank))
    return x, teacher(x).argmax(1)


@hvd.elastic.run
def train(state):
    here = 0
    state.visited = [*state.visited, hvd.size()]
    while not happen(state.visited, here):
        x, y = batch(state.step, hvd.rank())
        for kind, optimizer in optimizers.items():
            optimizer.zero_grad()
            loss = torch.nn.functional.cross_entropy(nets[kind](x), y)
            loss.backward()
            hvd.allreduce(loss.detach(), name=f"loss.{kind}")  # the first to fail, while gradients are on their way
            if here == 0:
                state.checked = [*state.checked, [kind, hvd.size(), *synchronize_and_check(kind)]]
                with optimizer.skip_synchronize():
                    optimizer.step()
            else:
                optimizer.step()
            kept[kind] = memory(kind, "residual")
        step_locally(x, y)
        here += 1
        state.step += 1
        if here == 10:
            local.synchronize()
            state.identical = [*state.identical, *map(identical_on_all_ranks, nets.values())]
        state.commit()


state = hvd.elastic.TorchState(
    step=0,
    visited=[],
    checked=[],
    identical=[],
    **{f"net_{kind}": net for kind, net in nets.items()},
    **{f"optimizer_{kind}": optimizer for kind, optimizer in optimizers.items()},
    optimizer_local=inner,
    local=local,
)
train(state)
local.synchronize()

x, y = batch(10**6, 0, 2000)
result = {
    "visited": state.visited,
    "steps": state.step,
    "checked": state.checked,
    "loss": {},
    "identical": [*state.identical, *map(identical_on_all_ranks, nets.values())],
}
for kind, net in nets.items():
    with torch.no_grad():
        result["loss"][kind] = torch.nn.functional.cross_entropy(net(x), y).item()
    if kind == "local":
        continue
    # A step that one model had finished when another one failed was made once more.
    assert 0 <= optimizers[kind].compression_stats()["steps"] - state.step < len(state.visited)
assert local.compression_stats()["local_steps"] == state.step
(FOLDER / f"rank{hvd.rank()}.json").write_text(json.dumps(result))
