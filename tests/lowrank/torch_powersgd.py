"""One rank of torch's own PowerSGD under DistributedDataParallel: torch_powersgd.py FOLDER RANK RANKS.

Reads FOLDER/given.npz ({run}.{step}.{rank}.{name} gradients and {run}.q.{name}: what Q starts from, [m, r]; run is
RANK-OF-FACTORS_FEEDBACK) and writes FOLDER/torch{RANK}.npz with the averages ({run}.{step}.{name}), and with the errors and
the factors kept ({run}.{step}.error.{name}, {run}.{step}.q.{name}: [m, r]).
"""

import sys
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook

WARM_UP = 2  # torch wants that many whole steps before; their gradients are zero


class Given(torch.nn.Module):
    """The gradient of its output is whatever is given."""

    def __init__(self, shapes):
        super().__init__()
        self.weights = torch.nn.ParameterDict({name: torch.zeros(shape) for name, shape in shapes.items()})

    def forward(self, gradients):
        return sum((self.weights[name] * gradient).sum() for name, gradient in gradients.items())


def main(folder: Path, rank: int, ranks: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=ranks)
    with np.load(folder / "given.npz") as file:
        given = {key: torch.from_numpy(file[key]) for key in file.files}
    found = {}
    for run in sorted({key.split(".")[0] for key in given}):
        steps = 1 + max(int(key.split(".")[1]) for key in given if key.startswith(f"{run}.") and ".q." not in key)
        gradients = [
            {key.split(".")[3]: g for key, g in given.items() if key.startswith(f"{run}.{i}.{rank}.")} for i in range(steps)
        ]
        starts = {key.split(".")[2]: q for key, q in given.items() if key.startswith(f"{run}.q.")}
        found.update(train(run, gradients, starts))
    np.savez(folder / f"torch{rank}.npz", **found)
    dist.destroy_process_group()


def train(run, gradients, starts):
    rank_of_factors, feedback = run.split("_")
    state = PowerSGDState(None, int(rank_of_factors), start_powerSGD_iter=WARM_UP, use_error_feedback=feedback == "residual")
    shapes = {name: g.shape for name, g in gradients[0].items()}
    name_of = {shape: name for name, shape in shapes.items()}
    order = []

    def hook(state, bucket):
        if state.iter == WARM_UP and not state.q_memory_dict:  # the same start as ours, in place of torch's random one
            order[:] = [name_of[g.shape] for g in bucket.gradients()]
            state.q_memory_dict[0] = torch.cat([starts[name].flatten() for name in order if name in starts])
            rows = sum(shapes[name][0] * starts[name].shape[1] for name in order if name in starts)
            state.p_memory_dict[0] = torch.empty(rows)
        return powerSGD_hook(state, bucket)

    net = torch.nn.parallel.DistributedDataParallel(Given(shapes))
    net.register_comm_hook(state, hook)
    found = {}
    for i in range(-WARM_UP, len(gradients)):
        given = gradients[i] if i >= 0 else {name: torch.zeros(shape) for name, shape in shapes.items()}
        net.zero_grad()
        net(given).backward()
        if i < 0:
            continue
        assert state.iter == WARM_UP + i + 1 and len(order) == len(shapes), "one bucket, compressed from step WARM_UP on"
        for name, weight in net.module.weights.items():
            found[f"{run}.{i}.{name}"] = weight.grad.numpy().copy()
        if state.use_error_feedback:
            errors = torch.split(state.error_dict[0], [shapes[name].numel() for name in order])
            for name, error in zip(order, errors, strict=True):
                found[f"{run}.{i}.error.{name}"] = error.reshape(shapes[name]).numpy().copy()
        compressed = [name for name in order if name in starts]
        factors = torch.split(state.q_memory_dict[0], [starts[name].numel() for name in compressed])
        for name, q in zip(compressed, factors, strict=True):
            found[f"{run}.{i}.q.{name}"] = q.reshape(starts[name].shape).numpy().copy()
    return found


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
