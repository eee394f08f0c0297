"""What the checks of the DDP hook share."""

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from grace_ext.adapters.torch_ddp import CompressionState, comm_hook

WIDTH, CLASSES = 100, 10
#: Selection that does not depend on how tensors are put together in buckets, and no randomness.
EACH = "topk:0.02:per=tensor/rice/raw"


def module(seed=1):
    """Of more than 1 MiB, so that DDP has one bucket in the first step and two from the second on."""
    torch.manual_seed(seed)
    return torch.nn.Sequential(
        torch.nn.Linear(WIDTH, 600),
        torch.nn.ReLU(),
        torch.nn.Linear(600, 500),
        torch.nn.ReLU(),
        torch.nn.Linear(500, CLASSES),
    )


def batches(steps, start=0, rank=None, batch=8):
    """Other data on every rank and in every step."""
    rank = dist.get_rank() if rank is None else rank
    for step in range(start, start + steps):
        generator = torch.Generator().manual_seed(1000 * rank + step)
        yield (torch.randn(batch, WIDTH, generator=generator), torch.randint(0, CLASSES, (batch,), generator=generator))


def wrap(net, spec=None, ddp=(), **options):
    """(DDP, the state of the hook); without a spec plain DDP and None."""
    model = DistributedDataParallel(net, **dict(ddp))
    if spec is None:
        return model, None
    options = {"named_parameters": net.named_parameters(), "compression": spec} | options
    state = CompressionState(**options)
    model.register_comm_hook(state, comm_hook)
    return model, state


def loss_of(model, x, y):
    return torch.nn.functional.cross_entropy(model(x), y)


def sgd(net):
    return torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)


def train(spec=None, steps=5, ddp=(), net=None, **options):
    """Returns the flat parameters and the state."""
    net = net or module()
    model, state = wrap(net, spec, ddp, **options)
    optimizer = sgd(net)
    for x, y in batches(steps):
        optimizer.zero_grad()
        loss_of(model, x, y).backward()
        optimizer.step()
    return flat(net), state


def flat(net):
    return torch.cat([p.detach().double().flatten() for p in net.parameters()])


def same_on_all_ranks(tensor, group=None):
    rows = [torch.empty_like(tensor) for _ in range(dist.get_world_size(group))]
    dist.all_gather(rows, tensor.contiguous(), group=group)
    assert all(torch.equal(rows[0], row) for row in rows), "ranks hold different bits"


def close(ours, theirs, atol=1e-6):
    assert torch.allclose(ours, theirs, rtol=0, atol=atol), (ours - theirs).abs().max()
