"""What the checks of the PyTorch adapter share."""

import horovod.torch as hvd
import torch

from grace_ext.adapters.horovod_torch import DistributedOptimizer


def model(seed=1):
    torch.manual_seed(seed)
    return torch.nn.Sequential(
        torch.nn.Conv2d(1, 16, 3),
        torch.nn.BatchNorm2d(16),
        torch.nn.ReLU(),
        torch.nn.MaxPool2d(2),
        torch.nn.Flatten(),
        torch.nn.Linear(16 * 13 * 13, 64),
        torch.nn.ReLU(),
        torch.nn.Linear(64, 10),
    )


def batches(steps, batch=8, rank=None):
    """Other data on every rank."""
    generator = torch.Generator().manual_seed(100 + (hvd.rank() if rank is None else rank))
    for _ in range(steps):
        yield torch.randn(batch, 1, 28, 28, generator=generator), torch.randint(0, 10, (batch,), generator=generator)


def train(wrap, steps=5, net=None, passes=1):
    """Train on other data on every rank; returns the flat parameters, the optimizer and the model."""
    net = net or model()
    optimizer = wrap(torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9), net.named_parameters())
    hvd.broadcast_parameters(net.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    data = batches(steps * passes)
    for _ in range(steps):
        optimizer.zero_grad()
        for _ in range(passes):
            x, y = next(data)
            torch.nn.functional.cross_entropy(net(x), y).backward()
        optimizer.step()
    return flat(net), optimizer, net


def flat(net):
    return torch.cat([p.detach().double().flatten() for p in net.parameters()])


def same_on_all_ranks(tensor):
    # Without a name Horovod pairs by a count, which differs where ranks have done different numbers of steps.
    gathered = hvd.allgather(tensor[None].contiguous(), name="same_on_all_ranks")
    assert all(torch.equal(gathered[0], row) for row in gathered), "ranks hold different bits"


def horovod(**options):
    return lambda optimizer, named: hvd.DistributedOptimizer(optimizer, named_parameters=named, **options)


def compressed(spec="topk:0.01/rice/qsgd:7", **options):
    return lambda optimizer, named: DistributedOptimizer(optimizer, named, spec, **options)
