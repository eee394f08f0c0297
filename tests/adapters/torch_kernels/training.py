"""A network, and steps of a training, for the workers."""

import torch
import torch.distributed as dist


class Lookup(torch.nn.Module):
    """Makes of 80 numbers ten rows of a table, whose gradient comes as rows."""

    def __init__(self):
        super().__init__()
        self.table = torch.nn.Embedding(600, 8, sparse=True)

    def forward(self, x):
        return self.table((10 * x[:, :10]).long() % 600).flatten(1)


def network(with_table=False, hidden=60):
    torch.manual_seed(1)
    first = [Lookup()] if with_table else []
    return torch.nn.Sequential(*first, torch.nn.Linear(80, hidden), torch.nn.ReLU(), torch.nn.Linear(hidden, 10))


def train(model, optimizer, steps=4):
    """Each rank has data of its own."""
    generator = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(steps):
        optimizer.zero_grad()
        x, y = torch.randn(8, 80, generator=generator), torch.randint(0, 10, (8,), generator=generator)
        torch.nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
