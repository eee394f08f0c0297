"""What the checks of local steps share, over either library: torch.distributed under torchrun, Horovod elsewhere."""

import itertools
import os

import torch

from grace_ext.adapters.local_steps import LocalSteps

OVER_TORCH = "TORCHELASTIC_RUN_ID" in os.environ
if OVER_TORCH:
    import torch.distributed as dist
else:
    import horovod.torch as hvd

WIDTH, CLASSES = 40, 10
_names = itertools.count()


def begin() -> None:
    if OVER_TORCH:
        dist.init_process_group("gloo")
    else:
        hvd.init(process_sets="dynamic")
    torch.set_num_threads(1)


def rank() -> int:
    return dist.get_rank() if OVER_TORCH else hvd.rank()


def ranks() -> int:
    return dist.get_world_size() if OVER_TORCH else hvd.size()


def gather(tensor) -> torch.Tensor:
    """[ranks, n] of all ranks' flat tensors."""
    flat = tensor.detach().flatten()
    if OVER_TORCH:
        rows = [torch.empty_like(flat) for _ in range(ranks())]
        dist.all_gather(rows, flat.contiguous())
        return torch.stack(rows)
    return hvd.allgather(flat[None], name=f"gather.{next(_names)}")


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = torch.nn.Sequential(
            torch.nn.Linear(WIDTH, 64), torch.nn.BatchNorm1d(64), torch.nn.ReLU(), torch.nn.Linear(64, CLASSES)
        )

    def forward(self, x):
        return self.inner(x)


def net(seed=1):
    torch.manual_seed(seed)
    return Net()


def batch(step, of=None):
    """Other data on every rank and in every step."""
    generator = torch.Generator().manual_seed(1000 * (rank() if of is None else of) + step)
    return torch.randn(8, WIDTH, generator=generator), torch.randint(0, CLASSES, (8,), generator=generator)


def adamw(model):
    return torch.optim.AdamW(model.parameters(), lr=3e-3)


def train_step(model, optimizers, step, of=None):
    optimizers = optimizers if isinstance(optimizers, list) else [optimizers]
    x, y = batch(step, of)
    for optimizer in optimizers:
        optimizer.zero_grad()
    torch.nn.functional.cross_entropy(model(x).float(), y).backward()
    for optimizer in optimizers:
        optimizer.step()


def train(model, optimizers, local: LocalSteps, steps, first=0, **given):
    """Returns how many rounds have ended."""
    ended = 0
    for step in range(first, first + steps):
        train_step(model, optimizers, step)
        ended += local.step(**given)
    return ended


def flat(model):
    return torch.cat([p.detach().double().flatten() for p in model.parameters()])


def same_on_all_ranks(tensor):
    rows = gather(tensor)
    assert all(torch.equal(rows[0], row) for row in rows), "ranks hold different bits"
