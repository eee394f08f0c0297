"""A sharded model and its training, for the checks of fully_shard."""

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

WIDTH, WORDS = 45, 61  # which no number of ranks divides
GROUPS = ("model", "blocks.0", "blocks.1")


class Net(torch.nn.Module):
    def __init__(self, unused=False):
        super().__init__()
        torch.manual_seed(1)
        self.embedding = torch.nn.Embedding(WORDS, WIDTH)
        self.blocks = torch.nn.ModuleList(torch.nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.head = torch.nn.Linear(WIDTH, WORDS)
        self.unused = torch.nn.Linear(WIDTH, WIDTH) if unused else None

    def forward(self, x):
        x = self.embedding(x)
        for block in self.blocks:
            x = x + torch.relu(block(x))
        return self.head(x)


def sharded(mesh=None, net=None, **options):
    """A model that is sharded over the mesh, or over all ranks."""
    net = Net() if net is None else net
    mesh = init_device_mesh("cpu", (dist.get_world_size(),)) if mesh is None else mesh
    for block in net.blocks:
        fully_shard(block, mesh=mesh, **options)
    return fully_shard(net, mesh=mesh, **options)


def batch(rank, step):
    x = torch.randint(0, WORDS, (32,), generator=torch.Generator().manual_seed(100 * rank + step))
    return x, (7 * x + 3) % WORDS


def loss_of(net, rank, step):
    x, y = batch(rank, step)
    return torch.nn.functional.cross_entropy(net(x).float(), y)


def adamw(net):
    return torch.optim.AdamW(net.parameters(), lr=1e-2)


def train(net, steps, optimizer=None, first=0, scaler=None, rank=None):
    """Make steps, numbered from `first`; returns the optimizer."""
    optimizer = adamw(net) if optimizer is None else optimizer
    rank = dist.get_rank() if rank is None else rank
    for step in range(first, first + steps):
        loss = loss_of(net, rank, step)
        (loss if scaler is None else scaler.scale(loss)).backward()
        optimizer.step() if scaler is None else scaler.step(optimizer)
        if scaler is not None:
            scaler.update()
        optimizer.zero_grad()
    return optimizer


def own(net):
    """This rank's shards, by name."""
    return {name: p.to_local().detach().clone() for name, p in net.named_parameters()}


def assert_same(one, other):
    assert one.keys() == other.keys()
    for name in one:
        assert torch.equal(one[name], other[name]), name
