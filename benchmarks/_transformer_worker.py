"""One rank of a run of benchmarks/transformer.py, which starts it: _transformer_worker.py OPTIONS, with the options as JSON.

Rank 0 writes the result, a JSON object, to options["out"].
"""

import json
import sys
import time

import horovod.torch as hvd
import torch
from _lib import write_whole
from _transformer_tasks import TASKS, Task, learning_rate

from grace_ext.adapters.horovod_torch import DistributedOptimizer
from grace_ext.adapters.onebit_adam import OneBitAdam
from grace_ext.observe import Writer
from grace_ext.observe.capture import Capture

EVALUATIONS = 12
LAG_EVERY = 50  # steps


class Lags(Writer):
    """Keeps the lag of rank 0 by step, in the place of a file."""

    def __init__(self):
        super().__init__("lags", LAG_EVERY)
        self.found: list[tuple[int, float]] = []

    def write(self, record):
        if record["lag"] is not None:
            self.found.append((record["step"], record["lag"]))


def wrap(optimizer, model, library: str, arguments: dict, lags: Lags, capture: Capture | None = None):
    """Wrap an optimizer. library: "horovod", "grace_ext" or "onebit_adam", which take the arguments."""
    if library == "horovod":
        compression = getattr(hvd.Compression, arguments["compression"])
        return hvd.DistributedOptimizer(optimizer, model.named_parameters(), compression)
    kind = {"grace_ext": DistributedOptimizer, "onebit_adam": OneBitAdam}[library]
    return kind(optimizer, model.named_parameters(), observe=lags, capture=capture, **arguments)


def evaluate(task: Task, data, model) -> dict[str, float]:
    """Compute the mean loss and the accuracy; each rank evaluates its share."""
    sums = torch.tensor(data.evaluate(model, hvd.rank(), hvd.size()), dtype=torch.float64)
    loss, right, count = hvd.allreduce(sums, op=hvd.Sum, name="evaluate").tolist()
    return {"loss": loss / count, "accuracy": right / count}


def bytes_sent(optimizers, library: str, arguments: dict, model, steps: int) -> int:
    """Return the bytes that this rank has handed to collectives: gradients, headers and padding."""
    if library == "horovod":
        width = {"none": 4, "fp16": 2}[arguments["compression"]]
        return width * steps * sum(p.numel() for p in model.parameters())
    return sum(optimizer.compression_stats()["bytes_out"] for optimizer in optimizers)


def main() -> None:
    options = json.loads(sys.argv[1])
    hvd.init()
    torch.set_num_threads(1)
    torch.manual_seed(options["seed"])
    task = TASKS[options["task"]]
    data, model = task.data(options["data"]), task.model()
    if options["starts_from"]:
        model.load_state_dict(torch.load(options["starts_from"], weights_only=True))
    optimizers = task.optimizers(model, options["lr"], tuple(options["betas"]), options["plain"])
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    lags = [Lags() for _ in optimizers]
    capture = options["capture"] and Capture(*options["capture"])
    optimizers = [
        wrap(optimizer, model, options["library"], options["arguments"], found, capture)
        for optimizer, found in zip(optimizers, lags, strict=True)
    ]
    schedules = [
        torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: learning_rate(step, options["steps"]))
        for optimizer in optimizers
    ]
    generator = torch.Generator().manual_seed(1000 * options["seed"] + hvd.rank())
    evaluated = {round(options["steps"] * (i + 1) / EVALUATIONS) for i in range(EVALUATIONS)}
    curve, seconds, started = [], 0.0, time.perf_counter()
    for step in range(1, options["steps"] + 1):
        for optimizer in optimizers:
            optimizer.zero_grad()
        data.loss(model, data.batch(generator, options["batch"])).backward()
        for stepped in (*optimizers, *schedules):
            stepped.step()
        if step in evaluated:
            seconds += time.perf_counter() - started
            found = evaluate(task, data, model)
            sent = bytes_sent(optimizers, options["library"], options["arguments"], model, step)
            curve.append({"step": step, "seconds": seconds, "bytes_sent": sent, **found})
            if hvd.rank() == 0:
                print(f"[transformer] step {step}/{options['steps']}: loss {found['loss']:.4f}", flush=True)
            started = time.perf_counter()
    parameters = [p.detach().double().abs().sum() for p in model.parameters()]
    sums = hvd.allgather(torch.stack(parameters).sum().reshape(1), name="identical")
    if hvd.rank() == 0:
        found = {"curve": curve, "parameters": sum(p.numel() for p in model.parameters())}
        found["lags"] = lags[0].found
        found["identical"] = bool((sums == sums[0]).all())
        if options["model_out"]:
            torch.save(model.state_dict(), options["model_out"])
        write_whole(found, options["out"])


if __name__ == "__main__":
    main()
