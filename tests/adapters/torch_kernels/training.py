"""A network, and steps of a training, for the workers."""

import torch
import torch.distributed as dist


def network():
    torch.manual_seed(1)
    return torch.nn.Sequential(torch.nn.Linear(80, 60), torch.nn.ReLU(), torch.nn.Linear(60, 10))


def train(model, optimizer, steps=4):
    """Each rank has data of its own."""
    generator = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(steps):
        optimizer.zero_grad()
        x, y = torch.randn(8, 80, generator=generator), torch.randint(0, 10, (8,), generator=generator)
        torch.nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
