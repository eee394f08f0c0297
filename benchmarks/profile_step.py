"""Where the time of a step goes, under each launcher and with several cycle times of Horovod; a section of docs/benchmarks.md.

    python benchmarks/profile_step.py --data DIR

All ranks are on this machine. The ways to exchange take turns in one job, in blocks of a few steps. About ten minutes on two
idle cores.
"""

import argparse
import datetime
import json
import os
import random
import statistics
import sys
import threading
import time

from _lib import ROOT, SHARED_CORES, RunFailed, as_markdown, finish, machine
from _page import write_section

LAUNCHERS = {"horovodrun --mpi": "--mpi", "horovodrun --gloo": "--gloo"}
WAYS = {
    "compute alone": None,
    "Horovod float32": "none",
    "Horovod fp16": "fp16",
    "grace_ext": {},
    "grace_ext, buckets of 8 MiB": {"bucket_bytes": 8 * 2**20},
    "grace_ext, buckets of 4 MiB": {"bucket_bytes": 4 * 2**20},
    "grace_ext, auto": {"communicator": "auto"},
}
MODELS = ("mlp", "cnn", "text")
THREADS = ("caller", "worker", "Horovod")
WARM_UP = 200  # steps before, more than the first ones of Adam's default, which are denser
BLOCKS, BEFORE, BLOCK = 10, 3, 10  # blocks of each way, and their steps that don't and that do count


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", required=True, help="folder of Fashion-MNIST; the text is kept there, too")
    parser.add_argument("--out", default=os.path.join(ROOT, "docs"), help="folder of benchmarks.md")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=["mlp"])
    parser.add_argument("--launchers", nargs="+", choices=LAUNCHERS, default=list(LAUNCHERS))
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--cycles", nargs="+", type=float, default=[1.0, 50.0], help="HOROVOD_CYCLE_TIME, milliseconds")
    parser.add_argument("--worker", metavar="FILE", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        return work(args)
    from _cluster_tasks import write_words

    if "text" in args.models:
        write_words(args.data)
    log = os.path.join(ROOT, "build", "profile_step.json")
    os.makedirs(os.path.dirname(log), exist_ok=True)
    found = {}
    for model in args.models:
        for launcher in args.launchers:
            for cycle in args.cycles:
                label = f"{model}, {launcher}, cycles of {cycle:g} ms"
                command = [
                    "horovodrun",
                    LAUNCHERS[launcher],
                    "-np",
                    str(args.ranks),
                    "--start-timeout",
                    "120",
                    sys.executable,
                ]
                options = ["--data", args.data, "--models", model, "--worker", log, "--ways", *args.ways]
                finish(label, [*command, __file__, *options], 1200, {**SHARED_CORES, "HOROVOD_CYCLE_TIME": f"{cycle:g}"})
                with open(log) as file:
                    found[model, launcher, cycle] = json.load(file)
    text = document(found, args)
    print(text)
    write_section(args.out, "profile", "Where the time of a step goes", text)
    return 0


class Way:
    """One way to exchange, with a model and an optimizer of its own."""

    def __init__(self, task, kind, hvd):
        import torch

        torch.manual_seed(0)
        self.model = task.build()
        self.optimizer = task.optimizer(self.model.parameters())
        if isinstance(kind, str):
            compression = getattr(hvd.Compression, kind)
            self.optimizer = hvd.DistributedOptimizer(self.optimizer, self.model.named_parameters(), compression)
        elif kind is not None:
            from grace_ext.adapters.horovod_torch import DistributedOptimizer

            self.optimizer = DistributedOptimizer(self.optimizer, self.model.named_parameters(), **kind)
        self.compresses = isinstance(kind, dict)
        self.steps: list[float] = []
        self.core: dict[str, float] = dict.fromkeys(THREADS, 0.0)
        self.stages: dict[str, float] = {}

    def step(self, task, batch) -> None:
        self.optimizer.zero_grad()
        task.loss(self.model, batch).backward()
        self.optimizer.step()

    def count(self, seconds: float, core: dict[str, float]) -> None:
        self.steps.append(seconds)
        for kind, spent in core.items():
            self.core[kind] += spent
        if self.compresses:
            last = self.optimizer.compression_stats()["last_step"]
            stages = {**last["seconds"], "exposed": last["exposed_seconds"]}
            for stage, spent in stages.items():
                self.stages[stage] = self.stages.get(stage, 0.0) + spent


def work(args) -> int:
    """Run one rank; rank 0 writes what it measured."""
    before = set(os.listdir("/proc/self/task"))
    import horovod.torch as hvd
    import torch
    from _cluster_tasks import TASKS

    hvd.init()
    horovods = set(os.listdir("/proc/self/task")) - before
    torch.set_num_threads(1)
    task = TASKS[args.models[0]]
    task.load(args.data)
    generator = torch.Generator().manual_seed(hvd.rank())
    ways = {name: Way(task, WAYS[name], hvd) for name in args.ways}
    for way in ways.values():
        for _ in range(WARM_UP):
            way.step(task, task.batch(generator))
    order = random.Random(0)
    for _ in range(BLOCKS):
        for name in order.sample(list(ways), len(ways)):
            hvd.allreduce(torch.zeros(1), name="begin")
            for number in range(BEFORE + BLOCK):
                batch = task.batch(generator)
                core, began = core_seconds(horovods), time.perf_counter()
                ways[name].step(task, batch)
                taken, after = time.perf_counter() - began, core_seconds(horovods)
                if number >= BEFORE:
                    ways[name].count(taken, {kind: after[kind] - core[kind] for kind in THREADS})
    if hvd.rank() == 0:
        found = {name: {"steps": way.steps, "core": way.core, "stages": way.stages} for name, way in ways.items()}
        with open(args.worker, "w") as file:
            json.dump(found, file)
    return 0


def core_seconds(horovods: set[str]) -> dict[str, float]:
    """Return the seconds of a core that the threads of this process have taken, by kind. horovods: ids of Horovod's threads."""
    kinds = {str(thread.native_id): "worker" for thread in threading.enumerate() if thread.name.startswith("grace_ext")}
    kinds |= {str(threading.main_thread().native_id): "caller", **dict.fromkeys(horovods, "Horovod")}
    taken = dict.fromkeys(THREADS, 0.0)
    for thread, kind in kinds.items():
        try:
            with open(f"/proc/self/task/{thread}/schedstat", encoding="ascii") as file:
                taken[kind] += 1e-9 * int(file.read().split()[0])
        except FileNotFoundError:  # it has ended
            pass
    return taken


def document(found: dict, args) -> str:
    table = [["", "way", "ms a step", *(f"core, {kind}" for kind in THREADS), "encode and decode", "waits", "exposed"]]
    for (model, launcher, cycle), ways in found.items():
        for name, way in ways.items():
            count = len(way["steps"])
            stages = {stage: 1e3 * spent / count for stage, spent in way["stages"].items()}
            codecs = sum(spent for stage, spent in stages.items() if stage not in ("exchange", "exposed"))
            table.append(
                [
                    f"{model}, `{launcher}`, {cycle:g} ms",
                    name,
                    f"{1e3 * statistics.median(way['steps']):.1f}",
                    *(f"{1e3 * way['core'][kind] / count:.1f}" for kind in THREADS),
                    *(
                        [f"{codecs:.1f}", f"{stages['exchange']:.1f}", f"{stages['exposed']:.1f}"]
                        if stages
                        else ["", "", ""]
                    ),
                ]
            )
    return "\n\n".join(
        [
            f"{args.ranks} ranks on this machine, one thread each, default compression of each model's optimizer; times in "
            "milliseconds a step of rank 0. The ways take turns in one job, in blocks of "
            f"{BLOCK} steps. The first column has HOROVOD_CYCLE_TIME. *core* is the processor time of the thread that calls "
            "`step()`, of grace_ext's worker, and of all threads that Horovod and MPI have made. *waits* is the time that the "
            "worker and the caller wait for collectives, *exposed* that by which encoding and decoding delay the step.",
            as_markdown(table).replace("|---|--:|", "|---|---|", 1),
            f"Medians of {BLOCKS * BLOCK} steps for the step, means for the rest; measured on {datetime.date.today().isoformat()} on "
            f"{machine()}, by `python benchmarks/profile_step.py --data DIR`.",
        ]
    )


if __name__ == "__main__":
    try:
        sys.exit(main())
    except RunFailed as error:
        sys.exit(f"[profile] error: {error}")
