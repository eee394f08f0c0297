"""One rank of a run of benchmarks/local_steps.py, which starts it: _local_steps_worker.py OPTIONS, with the options as JSON. It
runs over Horovod, and with torchrun's variables in the environment over torch.distributed, where steps are only measured.

Rank 0 writes the result, a JSON object, to options["out"]. With options["measure"] it says how long steps take, else how good
the model is. Over torch.distributed, steps with and without an exchange then take turns, options["turn"] of each, after the first
options["settled"], so that both are measured at the same time.
"""

import contextlib
import json
import os
import statistics
import sys
import time

import horovod.torch as hvd
import torch
import torch.distributed as dist
from _lib import write_whole
from _local_steps_results import is_alone
from _transformer_tasks import TASKS, learning_rate
from _transformer_worker import EVALUATIONS, Lags, bytes_sent, evaluate, wrap

from grace_ext.adapters.local_adamw import LocalAdamW
from grace_ext.adapters.local_steps import LocalSteps
from grace_ext.adapters.torch_ddp import CompressionState, comm_hook
from grace_ext.means import WeightedMean

SETTLED = 10  # steps after which no connection is new


def local_adamw(task, model, workers: int) -> list[LocalAdamW]:
    """Make the task's AdamW for local steps."""
    (adamw,) = task.optimizers(model, task.lr, tuple(task.betas))
    groups = [{"params": group["params"], "weight_decay": group["weight_decay"]} for group in adamw.param_groups]
    return [LocalAdamW(groups, task.lr, workers=workers)]


class PerStep:
    """An exchange in each step, or with library "alone" or "ddp" none that is made here, with what `LocalSteps` has of methods."""

    def __init__(self, optimizers, model, library: str, arguments: dict):
        self.optimizers = list(optimizers)
        if library not in ("alone", "ddp"):
            self.optimizers = [wrap(optimizer, model, library, arguments, Lags()) for optimizer in optimizers]
        self._model, self._library, self._arguments = model, library, arguments

    def step(self) -> bool:
        return True

    def synchronize(self) -> None:
        """Ranks are equal after each step."""

    def shared(self) -> contextlib.AbstractContextManager:
        return contextlib.nullcontext()

    def stats(self, steps: int) -> dict:
        if self._library in ("alone", "ddp"):
            return {"bytes_sent": 0, "rounds": 0}
        sent = bytes_sent(self.optimizers, self._library, self._arguments, self._model, steps)
        return {"bytes_sent": sent, "rounds": steps}


class Local:
    """Rounds of local steps. arguments: of LocalSteps; "ramp": n steps more in each round than in the one before, until there are
    `steps`; "weighted": whether the mean is the weighted one, whatever the preset's."""

    def __init__(self, optimizers, model, arguments: dict):
        arguments = dict(arguments)
        ramp, steps = arguments.pop("ramp", None), arguments["steps"]
        if arguments.pop("weighted", False):
            arguments["mean"] = WeightedMean()
        if ramp:
            arguments["steps"] = lambda number: min(ramp * number, steps)
        self.optimizers, self._local = optimizers, LocalSteps(model, optimizers, **arguments)

    def step(self) -> bool:
        return self._local.step()

    def synchronize(self) -> None:
        self._local.synchronize()

    def shared(self) -> contextlib.AbstractContextManager:
        return self._local.shared()

    def stats(self, steps: int) -> dict:
        stats = self._local.compression_stats()
        sent = stats["bytes_out"] + stats["other_bytes_out"]
        return {"bytes_sent": sent, "rounds": stats["rounds"], "waited": stats["waited_seconds"]}


def in_ddp(model, optimizer) -> torch.nn.Module:
    """Put a model into DDP with grace_ext's default."""
    module = torch.nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
    module.register_comm_hook(CompressionState(list(module.named_parameters()), optimizer=optimizer), comm_hook)
    return module


def mean_of_ranks(milliseconds: float) -> float:
    """Of torch.distributed's ranks: a collective."""
    value = torch.tensor([milliseconds], dtype=torch.float64)
    dist.all_reduce(value)
    return float(value) / dist.get_world_size()


def begin() -> tuple[int, int]:
    """Begin with the library that this rank was started for, and return the number of the rank, and of ranks."""
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
        return dist.get_rank(), dist.get_world_size()
    hvd.init()
    return hvd.rank(), hvd.size()


def main() -> None:
    options = json.loads(sys.argv[1])
    rank, ranks = begin()
    torch.set_num_threads(1)
    torch.manual_seed(options["seed"])
    task = TASKS[options["task"]]
    data, model = task.data(options["data"]), task.model()
    arguments = dict(options["arguments"])
    if arguments.pop("local_adamw", False):
        optimizers = local_adamw(task, model, ranks)
    else:
        optimizers = task.optimizers(model, task.lr, tuple(task.betas))
    trained = in_ddp(model, *optimizers) if options["library"] == "ddp" else model  # all ranks have made the same model
    made = (
        Local(optimizers, model, arguments)
        if options["library"] == "local"
        else PerStep(optimizers, model, options["library"], arguments)
    )
    schedules = [
        torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: learning_rate(step, options["steps"]))
        for optimizer in made.optimizers
    ]
    generator = torch.Generator().manual_seed(1000 * options["seed"] + rank)
    evaluated = (
        set() if options["measure"] else {round(options["steps"] * (i + 1) / EVALUATIONS) for i in range(EVALUATIONS)}
    )
    curve, laps, alone, ends, began = [], [], [], [], time.perf_counter()
    for step in range(1, options["steps"] + 1):
        without = is_alone(step, options)
        if without != is_alone(step - 1, options):
            dist.barrier()
        started = time.perf_counter()
        for optimizer in made.optimizers:
            optimizer.zero_grad()
        data.loss(model if without else trained, data.batch(generator, task.batch)).backward()
        for stepped in (*made.optimizers, *schedules):
            stepped.step()
        ends += [step] if not without and made.step() else []
        (alone if without else laps).append(time.perf_counter() - started)
        if step in evaluated:
            if step == options["steps"]:
                made.synchronize()
            with made.shared():
                found = evaluate(task, data, model)
            curve.append({"step": step, "seconds": sum(laps), **made.stats(step), **found})
            if rank == 0:
                print(f"[local_steps] step {step}/{options['steps']}: loss {found['loss']:.4f}", flush=True)
    whole = laps[max([SETTLED, options.get("settled", 0), *ends[:1]]) :]  # the first round compiles
    found = {
        "curve": curve,
        "parameters": sum(p.numel() for p in model.parameters()),
        "ms_per_step": 1000 * statistics.mean(whole or laps),
        "seconds": time.perf_counter() - began,
        **made.stats(options["steps"]),
    }
    if alone:
        found["alone_ms_per_step"] = mean_of_ranks(1000 * statistics.mean(alone))
    if rank == 0:
        write_whole(found, options["out"])


if __name__ == "__main__":
    main()
