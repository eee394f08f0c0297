"""Transformers under AdamW: loss against bytes and seconds, method by method; writes docs/transformers.md.

    python benchmarks/transformer.py run --data DIR --tasks gpt vit --seeds 0 1 2
    python benchmarks/transformer.py cost
    python benchmarks/transformer.py page

Each run is a job of real ranks, those of the accuracy map excepted, and its result a file in benchmarks/results/transformers; a
run whose result is there is not repeated. `page` writes the tables and plots from these files. All runs take about a day on two idle cores.
"""

import argparse
import dataclasses
import json
import os
import sys
import time

from _accuracy_map import file_name, specs, train_all
from _lib import SHARED_CORES, RunFailed, launch
from _page import keep, part_of, read_part
from _transformer_cost import measure
from _transformer_job import job
from _transformer_page import write_page
from _transformer_results import DENSE, RESULTS, path_of
from _transformer_tasks import MAP, TASKS

from grace_ext.policy.defaults import ADAM

DENSITIES = (0.003, 0.01, 0.03, 0.1)


@dataclasses.dataclass
class Method:
    """A row of the tables.

    Attributes:
        label: What the page calls it.
        library: "horovod", "grace_ext" or "onebit_adam".
        arguments: Of the library's wrapper.
        lr: Factor of the task's learning rate, where the method's user would have to set it.
        plain: Whether its optimizer is SGD without momentum, because the method makes the rest of the step.
    """

    label: str
    library: str
    arguments: dict
    lr: float = 1.0
    plain: bool = False


def methods(name: str) -> dict[str, Method]:
    """List a task's methods by the names of their results."""
    task, dense = TASKS[name], Method("Horovod float32", "horovod", {"compression": "none"})
    if task.muon_lr is not None:
        feedback = {"compression": ADAM.compression, "memory": "residual", "schedule": ADAM.schedule}
        return {
            DENSE: dense,
            "default": Method("grace_ext, default", "grace_ext", {}),
            "residual": Method("grace_ext, the default's spec, residual", "grace_ext", feedback),
        }
    found = {
        DENSE: dense,
        "horovod-fp16": Method("Horovod fp16", "horovod", {"compression": "fp16"}),
        "onebit-adam": Method("1-bit Adam", "onebit_adam", {"warmup_steps": task.steps // 5}),
    }
    for rank in (1, 4):
        found[f"powersgd-{rank}"] = Method(f"PowerSGD rank {rank}", "grace_ext", {"compression": f"powersgd:{rank}"})
    demo = {"compression": "dct:64/topk:0.008:per=chunk/auto/lloyd:0.05", "memory": "demo"}
    found["demo"] = Method("DeMo, learning rate x 0.5", "grace_ext", demo, 0.5, plain=True)
    found["default"] = Method("grace_ext, default", "grace_ext", {})
    packed = {"memory": f"{ADAM.memory}:bits=8"}
    found["default-8-bit"] = Method("grace_ext, default, residual in 8 bits", "grace_ext", packed)
    for method, density, schedule in (("guarded", 0.012, "guarded"), ("sparser", 0.0054, "hyperbolic:steps=296")):
        arguments = {
            "compression": f"topk:{density:g}/rice_adaptive/lloyd:0.05",
            "memory": ADAM.memory,
            "schedule": {"density": schedule},
            "rules": {"<=4096": ADAM.small},
        }
        label = "grace_ext, guarded" if method == "guarded" else f"grace_ext, default with {100 * density:g} %"
        found[method] = Method(label, "grace_ext", arguments)
    for density in DENSITIES:
        exact = {"compression": f"topk:{density:g}/auto/lloyd"}
        percent = f"{100 * density:g} %"
        plain = {"compression": f"topk:{density:g}/rice/qsgd:7"}
        found[f"plain-{density:g}"] = Method(f"top-k {percent}, qsgd, residual", "grace_ext", plain)
        adam = {**exact, "memory": "adam", "schedule": {"density": f"hyperbolic:steps={max(1, round(2.1 / density))}"}}
        found[f"adam-{density:g}"] = Method(f"top-k {percent}, lloyd, adam", "grace_ext", adam)
        found[f"residual-{density:g}"] = Method(f"top-k {percent}, lloyd, residual", "grace_ext", exact)
        for lr in (1.0, 0.5):
            found[f"momentum-{density:g}-lr-{lr:g}"] = Method(
                f"top-k {percent}, lloyd, momentum" + ("" if lr == 1 else f", learning rate x {lr:g}"),
                "grace_ext",
                {**exact, "memory": f"momentum:{task.betas[0]:g}"},
                lr,
            )
    return found


def run(name: str, method_name: str, seed: int, args) -> None:
    """Train once, and keep the result. Raises RunFailed."""
    task = TASKS[name]
    method = methods(name)[method_name]
    out = path_of(name, method_name, seed, args.results)
    models = os.path.join(args.data, "models")
    os.makedirs(models, exist_ok=True)
    start = task.starts_from and os.path.join(models, f"{task.starts_from}-{seed}.pt")
    if start and not os.path.exists(start):
        raise RunFailed(f"{name} goes on from {task.starts_from}: run that with --methods {DENSE} --seeds {seed} first")
    script, options = job(
        name,
        method.library,
        method.arguments,
        args.data,
        part_of(out),
        seed=seed,
        steps=args.steps or task.steps,
        lr=method.lr * task.lr,
        plain=method.plain,
        starts_from=start,
        model_out=os.path.join(models, f"{name}-{seed}.pt") if method_name == DENSE else None,
    )
    began = time.perf_counter()
    launch(f"{name}, {method.label}, seed {seed}", script, [json.dumps(options)], args.ranks, args.timeout, SHARED_CORES)
    found = read_part(out)
    described = {
        key: options[key] for key in ("task", "seed", "steps", "batch", "lr", "betas", "plain", "library", "arguments")
    }
    found = {"label": method.label, **described, "ranks": args.ranks, **found, "minutes": (time.perf_counter() - began) / 60}
    keep(found, out)
    last = found["curve"][-1]
    ratio = last["step"] * 4 * found["parameters"] / last["bytes_sent"]
    print(f"[transformer] {name}, {method.label}, seed {seed}: {task.measure} {last[task.measure]:.4f}, {ratio:.0f}x fewer")


def run_map(seed: int, args) -> None:
    """Train with every spec of the accuracy map, and keep the results."""
    paths = {label: path_of(MAP, file_name(label), seed, args.results) for label in specs()}
    wanted = {label: spec for label, spec in specs().items() if not os.path.exists(paths[label])}
    steps = args.steps or TASKS[MAP].steps
    for number, (label, found) in enumerate(train_all(wanted, seed, steps, args.ranks, args.data), 1):
        keep(found, paths[label])
        print(
            f"[transformer] {MAP} {number}/{len(wanted)}: {label}: accuracy {found['curve'][-1]['accuracy']:.4f}", flush=True
        )


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    trains = commands.add_parser("run", help="train, and keep the results")
    trains.add_argument(
        "--data", required=True, help="folder of Fashion-MNIST; texts and trained models are kept there, too"
    )
    trains.add_argument("--tasks", nargs="+", default=list(TASKS), choices=TASKS)
    trains.add_argument("--methods", nargs="+", help="names of methods; default: all")
    trains.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    trains.add_argument(
        "--steps", type=int, help="instead of the task's own number, for a trial; use another --results then"
    )
    trains.add_argument("--ranks", type=int, default=4)
    trains.add_argument("--timeout", type=float, default=3600, help="seconds of one run")
    others = {"page": "write docs/transformers.md", "cost": "measure what the codecs cost, on an idle machine"}
    for command in (trains, *(commands.add_parser(name, help=text) for name, text in others.items())):
        command.add_argument("--results", default=RESULTS)
    args = parser.parse_args()
    if args.command in others:
        print({"page": write_page, "cost": measure}[args.command](args.results))
        return
    args.data, args.results = os.path.abspath(args.data), os.path.abspath(args.results)
    os.makedirs(args.results, exist_ok=True)
    for seed in args.seeds:
        for name in args.tasks:
            if name == MAP:
                run_map(seed, args)
                continue
            for method in args.methods or methods(name):
                if not os.path.exists(path_of(name, method, seed, args.results)):
                    run(name, method, seed, args)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except RunFailed as error:
        sys.exit(f"[transformer] error: {error}")
