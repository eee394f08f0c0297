"""One rank of a run of benchmarks/cluster.py, which starts it: _cluster_worker.py OPTIONS, with the options as JSON.

Rank 0 writes the measurements, a JSON object, to options["out"].
"""

import copy
import datetime
import itertools
import json
import os
import random
import statistics
import sys
import time

import torch
from _cluster_tasks import TASKS

WARM_UP = 5  # steps that are not measured: first buckets, compiled kernels, DDP's rebuild
TRIED = 10  # steps after those, from which the time of a full run is estimated
CUT = (10, 40)  # least and most steps of a run that would take too long
CUT_SECONDS = 30  # seconds that such a run should take
COMPUTE = 20  # steps without exchange
BLOCKS, BEFORE, BLOCK = 10, 3, 10  # of a comparison side by side: blocks, and steps of each that don't and that do count
INSTANCES = 3  # of each configuration there: they differ by up to a tenth


class Horovod:
    """Horovod's own optimizer, or grace_ext's in its place."""

    def __init__(self, own: str | None = None, **grace):
        """Make the optimizer.

        own: the name of one of hvd.Compression. grace: keyword arguments of grace_ext's DistributedOptimizer.
        """
        import horovod.torch as hvd

        self._hvd, self._own, self._grace = hvd, own, grace
        hvd.init()
        self.rank, self.ranks = hvd.rank(), hvd.size()

    def wrap(self, model, optimizer):
        if self._own:
            compression = getattr(self._hvd.Compression, self._own)
            return model, self._hvd.DistributedOptimizer(optimizer, model.named_parameters(), compression)
        from grace_ext.adapters.horovod_torch import DistributedOptimizer

        self._optimizer = DistributedOptimizer(optimizer, model.named_parameters(), **self._grace)
        return model, self._optimizer

    def sum(self, numbers: list[float]) -> list[float]:
        return self._hvd.allreduce(torch.tensor(numbers, dtype=torch.float64), op=self._hvd.Sum, name="numbers").tolist()

    def stages(self) -> dict[str, float]:
        """Return the seconds of grace_ext's stages so far."""
        return {} if self._own else self._optimizer.compression_stats()["seconds"]

    def ways(self) -> dict[str, str]:
        """Return what `auto` chose, by tensor."""
        return {} if self._own else self._optimizer.compression_stats()["ways"]


class Ddp:
    """torch's DistributedDataParallel over Gloo with one of its own hooks, or with grace_ext's."""

    def __init__(self, hook: str | None = None, **grace):
        """Make the process group.

        hook: "fp16" or "powersgd". grace: keyword arguments of grace_ext's CompressionState.
        """
        import torch.distributed as dist

        self._dist, self._hook, self._grace = dist, hook, grace
        dist.init_process_group("gloo")
        self.rank, self.ranks = dist.get_rank(), dist.get_world_size()

    def wrap(self, model, optimizer):
        from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

        parameters = list(model.named_parameters())
        # Over Gloo, the collectives that PowerSGD's hook starts from callbacks get mixed up between ranks if there are
        # several buckets, and the job dies.
        cap = 100 if self._hook == "powersgd" else None
        model = torch.nn.parallel.DistributedDataParallel(model, bucket_cap_mb=cap, gradient_as_bucket_view=True)
        if self._hook == "fp16":
            model.register_comm_hook(None, default_hooks.fp16_compress_hook)
        elif self._hook == "powersgd":  # from the second step on, the earliest that it allows
            state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=4, start_powerSGD_iter=2)
            model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
        else:
            from grace_ext.adapters.torch_ddp import CompressionState, comm_hook

            self._state = CompressionState(parameters, optimizer=optimizer, **self._grace)
            model.register_comm_hook(self._state, comm_hook)
        return model, optimizer

    def sum(self, numbers):
        total = torch.tensor(numbers, dtype=torch.float64)
        self._dist.all_reduce(total)
        return total.tolist()

    def stages(self) -> dict[str, float]:
        """Return the seconds of grace_ext's stages so far."""
        return {} if self._hook else self._state.compression_stats()["seconds"]

    def ways(self) -> dict[str, str]:
        """Return what `auto` chose, by tensor."""
        return {} if self._hook else self._state.compression_stats()["ways"]


class Clock:
    """Accumulates the costs of those parts of a run that are measured."""

    def __init__(self):
        self.total = [0.0] * 4

    def go(self):
        self._before = self._now()

    def stop(self):
        self.total = [total + now - before for total, now, before in zip(self.total, self._now(), self._before, strict=True)]

    @property
    def seconds(self) -> float:
        return self.total[0]

    @staticmethod
    def _now() -> list[float]:
        """Return seconds, seconds of a core, bytes sent and bytes received."""
        return [time.perf_counter(), time.process_time(), *link_bytes()]


def link_bytes() -> tuple[int, int]:
    """Return the bytes that this host's link has sent and received, headers included, as `mpirun/hosts bytes` shows them."""
    with open("/proc/net/dev") as file:
        counters = next(line.split(":")[1].split() for line in file if line.split(":")[0].strip() == "eth0")
    return int(counters[8]), int(counters[0])


def compute_seconds(group, task, model, optimizer, generator) -> list[float]:
    """Measure the median step without any exchange, while all ranks compute, in seconds and in seconds of a core."""
    group.sum([0.0])
    laps = []
    for _ in range(COMPUTE):
        core = time.process_time()
        seconds = one_step(task, model, optimizer, generator)
        laps.append((seconds, time.process_time() - core))
    return [statistics.median(column) for column in zip(*laps[COMPUTE // 4 :], strict=True)]


def train(group, task, options: dict) -> dict:
    torch.manual_seed(options["seed"])
    model = task.build()
    generator = torch.Generator().manual_seed(1000 * options["seed"] + group.rank)
    alone = copy.deepcopy(model)
    compute = compute_seconds(group, task, alone, task.optimizer(alone.parameters()), torch.Generator().manual_seed(1))
    del alone
    plain = model
    optimizer = task.optimizer(model.parameters())
    model, optimizer = group.wrap(model, optimizer)
    planned = last = options["steps"]
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, task.lr, planned, pct_start=0.15, cycle_momentum=False)
    evaluated = {round(planned * (i + 1) / options["evaluations"]) for i in range(options["evaluations"])}
    laps, curve, clock = [], [], Clock()
    group.sum([0.0])
    clock.go()
    step = 0
    while step < last:
        step += 1
        laps.append(one_step(task, model, optimizer, generator))
        schedule.step()
        if step == WARM_UP:
            clock.stop()
            early, stages = clock.total, group.stages()
            clock.go()
        elif step == WARM_UP + TRIED:
            clock.stop()
            typical = group.sum([statistics.median(laps[WARM_UP:])])[0] / group.ranks  # the same on all ranks
            if typical * planned > options["limit"]:
                last = min(planned, step + min(CUT[1], max(CUT[0], int(CUT_SECONDS / typical))))
            clock.go()
        if step in evaluated and last == planned:
            clock.stop()
            right, count = group.sum(list(task.right(plain, group.rank, group.ranks)))
            curve.append([step, clock.seconds, right / count])
            if group.rank == 0:
                print(f"[cluster] step {step}/{planned}, {clock.seconds:.1f} s: accuracy {right / count:.2%}", flush=True)
            group.sum([0.0])
            clock.go()
    clock.stop()
    measured = step - WARM_UP
    seconds = {name: (value - stages.get(name, 0.0)) / measured for name, value in group.stages().items()}
    names = sorted(seconds)
    mean = [
        number / group.ranks
        for number in group.sum(
            [
                *compute,
                *((late - start) / measured for late, start in zip(clock.total, early, strict=True)),
                *(seconds[name] for name in names),
            ]
        )
    ]
    keys = ("compute", "compute_core", "mean", "core", "sent", "received")
    seconds = dict(zip(names, mean[len(keys) :], strict=True))
    weights = sum(float(p.detach().double().abs().sum()) for p in plain.parameters())
    return {
        "steps": step,
        "planned": planned,
        "laps": laps[WARM_UP:],
        **dict(zip(keys, mean, strict=False)),
        "stages": seconds,
        "ways": group.ways(),
        "curve": curve,
        "seconds": clock.seconds,
        "identical": group.sum([weights])[0] == group.ranks * weights,
    }


def compare(options: dict) -> dict:
    """Run several configurations of Horovod in turns, one block of steps each, so that the machine is the same for all.

    Returns the median step of each of INSTANCES, mean of the ranks, by label. Each has its own model.
    """
    task = TASKS[options["model"]]
    tried = {}
    for label, number in itertools.product(options["side_by_side"], range(INSTANCES)):
        configuration = options["side_by_side"][label]
        group = Horovod(**configuration["arguments"])
        torch.manual_seed(options["seed"])
        model = task.build()
        model, optimizer = group.wrap(model, task.optimizer(model.parameters()))
        generator = torch.Generator().manual_seed(1000 * options["seed"] + group.rank)
        tried[label, number] = (group, model, optimizer, generator, [])
        for _ in range(configuration["settles"]):
            one_step(task, model, optimizer, generator)
    for block in range(BLOCKS):
        # In another order each time, because each run affects the next one.
        for group, model, optimizer, generator, laps in random.Random(block).sample(list(tried.values()), len(tried)):
            group.sum([0.0])
            for _ in range(BEFORE):  # the caches are those of the one before, and ranks fall into step
                one_step(task, model, optimizer, generator)
            laps += [one_step(task, model, optimizer, generator) for _ in range(BLOCK)]
    medians = {key: group.sum([statistics.median(laps)])[0] / group.ranks for key, (group, *_, laps) in tried.items()}
    instances = {label: [medians[label, number] for number in range(INSTANCES)] for label in options["side_by_side"]}
    return {
        "instances": instances,
        "ways": {f"{label}, {number}": ways for (label, number), (group, *_) in tried.items() if (ways := group.ways())},
    }


def one_step(task, model, optimizer, generator) -> float:
    """Run a step, and return its seconds."""
    started = time.perf_counter()
    optimizer.zero_grad()
    task.loss(model, task.batch(generator)).backward()
    optimizer.step()
    return time.perf_counter() - started


def rounded(result):
    """Round the floats in it to six digits, which keeps the files small."""
    if isinstance(result, float):
        return float(f"{result:.6g}")
    if isinstance(result, dict):
        return {key: rounded(value) for key, value in result.items()}
    return [rounded(value) for value in result] if isinstance(result, list | tuple) else result


def main() -> None:
    options = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    task = TASKS[options["model"]]
    task.load(options["data"])
    group = {"horovod": Horovod, "ddp": Ddp}[options["library"]](**options["arguments"])
    result = compare(options) if "side_by_side" in options else train(group, task, options)
    if group.rank == 0:
        out = options.pop("out")
        del options["data"]  # neither is the measurement's business
        result |= {"date": datetime.date.today().isoformat(), "machine": options.pop("machine")}
        with open(out + ".new", "w") as file:
            json.dump(rounded({**result, "options": options}), file)
        os.replace(out + ".new", out)
    group.sum([0.0])  # the file is complete before any rank ends


if __name__ == "__main__":
    main()
