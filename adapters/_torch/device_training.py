"""Ranks that train with DDP, with kernels and on the host: do they get the same parameters? `device-check` starts two.

    torchrun --nproc-per-node 2 -m grace_ext.adapters._torch.device_training BACKEND DEVICE SPEC ...

BACKEND: gloo or nccl. DEVICE: cuda, or cpu in Triton's interpreter. Rank 0 prints an object of JSON for each spec: which it is, and
whether the parameters are the same on all ranks with both.
"""

import json
import os
import sys

import torch
import torch.distributed as dist

from ..torch_ddp import CompressionState, comm_hook

#: What `device-check` trains with.
SPECS = ("topk:0.02/rice/qsgd:7", "topk:0.02/auto/lloyd", "dense/qsgd:4", "adam")


class _Lookup(torch.nn.Module):
    """Makes of 80 numbers ten rows of a table, whose gradient comes as rows."""

    def __init__(self) -> None:
        super().__init__()
        self.table = torch.nn.Embedding(600, 8, sparse=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.table((10 * x[:, :10]).long() % 600).flatten(1)


def network(with_table: bool = False, hidden: int = 60) -> torch.nn.Module:
    """The same on all ranks."""
    torch.manual_seed(1)
    first = [_Lookup()] if with_table else []
    return torch.nn.Sequential(*first, torch.nn.Linear(80, hidden), torch.nn.ReLU(), torch.nn.Linear(hidden, 10))


def make_steps(model: torch.nn.Module, optimizer: torch.optim.Optimizer, steps: int = 4, device: str = "cpu") -> None:
    """Each rank has data of its own."""
    generator = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(steps):
        optimizer.zero_grad()
        x, y = torch.randn(8, 80, generator=generator), torch.randint(0, 10, (8,), generator=generator)
        torch.nn.functional.cross_entropy(model(x.to(device)), y.to(device)).backward()
        optimizer.step()


def train(spec: str, selection: str, device: str = "cpu") -> tuple[torch.Tensor, CompressionState]:
    """Train with a spec, or with "adam" for an AdamW and its default, "onebit_adam" for that memory, "rows" for a table.

    Returns the parameters and what has compressed their gradients.
    """
    net = network(with_table=spec == "rows", hidden=300 if spec.startswith("topk") else 60).to(device)
    model = torch.nn.parallel.DistributedDataParallel(net)
    if spec == "adam":
        optimizer: torch.optim.Optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
        state = CompressionState(net.named_parameters(), optimizer=optimizer, selection=selection)
    elif spec == "onebit_adam":
        optimizer = torch.optim.Adam(net.parameters(), lr=1e-3, weight_decay=0.01)
        state = CompressionState(
            net.named_parameters(), "dense/onebit", memory="onebit_adam:2", optimizer=optimizer, selection=selection
        )
    else:
        optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
        chosen = "topk:0.1/rice/qsgd:7" if spec == "rows" else spec
        state = CompressionState(net.named_parameters(), chosen, memory="residual", selection=selection)
    model.register_comm_hook(state, comm_hook)
    make_steps(model, optimizer, device=device)
    return torch.cat([p.detach().flatten() for p in net.parameters()]), state


def _is_same_on_all_ranks(one: torch.Tensor, other: torch.Tensor) -> bool:
    first = one.clone()
    dist.broadcast(first, 0)
    same = torch.tensor(int(torch.equal(one, other) and torch.equal(one, first)), device=one.device)
    dist.all_reduce(same, dist.ReduceOp.MIN)
    return bool(same)


def _main(backend: str, place: str, *specs: str) -> None:
    rank, gpus = int(os.environ["RANK"]), torch.cuda.device_count()
    device = place
    if place == "cuda":
        device = f"cuda:{rank % gpus}"
        torch.cuda.set_device(device)
        os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"  # so that products are the same in both trainings
        if gpus < 2:  # NCCL takes one rank for each GPU of a host, so each rank is a host of its own
            os.environ["NCCL_HOSTID"] = f"grace_ext-{rank}"
    torch.set_num_threads(1)
    dist.init_process_group(backend)
    for spec in specs:
        same = _is_same_on_all_ranks(train(spec, "device", device)[0], train(spec, "host", device)[0])
        if rank == 0:
            print(json.dumps({"spec": spec, "equal": same}), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    _main(*sys.argv[1:])
    os._exit(0)
