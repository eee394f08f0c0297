"""One rank of a run of benchmarks/fsdp.py, which starts it: _fsdp_worker.py OPTIONS, with the options as JSON."""

import json
import math
import os
import sys
import time

import torch
import torch.distributed as dist
from _lib import write_whole
from _transformer_tasks import TASKS, learning_rate
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from grace_ext.adapters.fsdp import CompressedReduceScatter

EVALUATIONS = 6
WIDTHS = {"float32": 4, "bfloat16": 2}


def shard(model, dtype: torch.dtype):
    """Shard each block, and the rest. dtype: of fully_shard's own reduce-scatter."""
    policy = MixedPrecisionPolicy(reduce_dtype=dtype)
    for block in model.blocks:
        fully_shard(block, mp_policy=policy)
    return fully_shard(model, mp_policy=policy)


def evaluate(task, data, model) -> float:
    """Compute the mean loss on the held-out text. Ranks have different numbers of batches, so each takes a whole model."""
    whole = task.model()
    whole.load_state_dict({name: p.full_tensor() for name, p in model.state_dict().items()})
    loss, _, count = data.evaluate(whole, dist.get_rank(), dist.get_world_size())
    sums = torch.tensor([loss, count], dtype=torch.float64)
    dist.all_reduce(sums)
    return (sums[0] / sums[1]).item()


def main() -> None:
    options = json.loads(sys.argv[1])
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    torch.manual_seed(options["seed"])
    ranks, rank = dist.get_world_size(), dist.get_rank()
    task = TASKS[options["task"]]
    data, model = task.data(options["data"]), task.model()
    own = options["compression"] in WIDTHS
    shard(model, getattr(torch, options["compression"] if own else "float32"))
    compression = None if own else CompressedReduceScatter(model, options["compression"], memory=options["memory"])
    (optimizer,) = task.optimizers(model, task.lr, task.betas)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: learning_rate(step, options["steps"]))
    generator = torch.Generator().manual_seed(1000 * options["seed"] + rank)
    evaluated = {round(options["steps"] * (i + 1) / EVALUATIONS) for i in range(EVALUATIONS)}
    parameters = sum(p.numel() for p in model.parameters())
    curve, seconds, started = [], 0.0, time.perf_counter()
    for step in range(1, options["steps"] + 1):
        optimizer.zero_grad()
        data.loss(model, data.batch(generator, task.batch)).backward()
        optimizer.step()
        schedule.step()
        if step in evaluated:
            seconds += time.perf_counter() - started
            loss = evaluate(task, data, model)
            if own:
                sent = step * WIDTHS[options["compression"]] * parameters * (ranks - 1) / ranks
            else:
                sent = compression.compression_stats()["bytes_out"]
            curve.append({"step": step, "seconds": seconds, "bytes_sent": sent, "loss": loss})
            if rank == 0:
                print(f"[fsdp] step {step}/{options['steps']}: loss {loss:.4f}", flush=True)
            started = time.perf_counter()
    if not all(math.isfinite(one["loss"]) for one in curve):
        raise ValueError("the loss is not finite")
    if rank == 0:
        write_whole({"curve": curve, "parameters": parameters}, options["out"])
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    os._exit(0)  # threads of Gloo that still hold a tensor abort at Python's end (pytorch/pytorch#190489)
