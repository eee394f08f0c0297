"""Local steps: loss against tokens, bytes and seconds, method by method; writes the section of docs/local-steps.md.

    python benchmarks/local_steps.py run --data DIR --seeds 0 1 2
    python benchmarks/local_steps.py links --data DIR --rates 10mbit 100mbit 1gbit --delays 0 20 100
    python benchmarks/local_steps.py page

`run` trains on this machine and keeps the losses; `links` measures a few rounds on four hosts with limited links, which needs
root, for mpirun/hosts; local steps go over torch.distributed there, and take turns with steps without an exchange. Each run's
result is a file in benchmarks/results/local-steps, and a run whose result is there is not repeated. The tasks are those of
benchmarks/transformer.py, and so are the runs with an exchange in each step, which have the same model, data and batches.
"""

import argparse
import itertools
import json
import os
import sys
from collections.abc import Iterator

from _hosts import OUR_ENVIRONMENT, Hosts, Job, JobFailed
from _lib import ROOT, SHARED_CORES, RunFailed, launch
from _local_steps_page import write_page
from _local_steps_results import ALONE, DDP, DEFAULT, HOROVODS, LONGER, methods, path_of, steps_of
from _page import keep, part_of, read_part
from _transformer_tasks import TASKS

WORKER = os.path.join(ROOT, "benchmarks", "_local_steps_worker.py")
RESULTS = os.path.join(ROOT, "benchmarks", "results", "local-steps")
TRANSFORMERS = os.path.join(ROOT, "benchmarks", "results", "transformers")
HOSTS, SEED = 4, 0
DENSER = 200  # steps in which the default for Adam sends more than later
ROUNDS = 8  # after which containers hardly outgrow the room that is kept for them
TURN, TURNS = 60, 3  # about so many steps with an exchange, then as many without, so often


def options_of(args, task: str, method: str, seed: int, steps: int, out: str, measure: bool) -> dict:
    _, library, arguments = methods()[method]
    given = {"task": task, "seed": seed, "steps": steps, "library": library, "arguments": arguments, "measure": measure}
    return {**given, "data": args.data, "out": part_of(out)}


def complete(out: str, label: str, options: dict, **more) -> dict:
    """Complete what a rank has written with what it was made with; it is a result from then on."""
    found = read_part(out)
    described = {key: options[key] for key in ("task", "seed", "steps", "library", "arguments")}
    found = {"label": label, **described, **more, **found}
    keep(found, out)
    return found


def name_of(rate: str, delay: float) -> str:
    return f"{rate}-{delay:g}ms"


def missing(args, which: str) -> Iterator[tuple[str, str, str, str]]:
    """Yield (task, method, label, path of the result) of runs without a result."""
    for task in args.tasks:
        for method in args.methods:
            out = path_of(args.results, task, method, which)
            if not os.path.exists(out):
                yield task, method, methods()[method][0], out


def lengths_of(library: str, arguments: dict) -> tuple[int, int]:
    """After how many steps measuring begins, and how many then take turns with as many that have no exchange; 0 for none."""
    if library == "local":  # whole rounds, and nothing is under way where they begin and end
        length = arguments["steps"]
        return ROUNDS * length + arguments.get("delay", 0), length * -(-TURN // length)
    return (DENSER if library in ("grace_ext", "ddp") else 0), (TURN if library == "ddp" else 0)


def run(args) -> None:
    for seed in args.seeds:
        for task, method, label, out in missing(args, f"seed{seed}"):
            if method in (ALONE, DDP, HOROVODS):
                continue
            if methods()[method][1] != "local":
                print(f"[local_steps] {label}: run benchmarks/transformer.py, whose results are shown", flush=True)
                continue
            options = options_of(args, task, method, seed, args.steps or steps_of(method, TASKS[task].steps), out, False)
            title = f"{task}, {label}, seed {seed}"
            launch(title, WORKER, [json.dumps(options)], args.ranks, args.timeout, SHARED_CORES)
            found = complete(out, label, options, ranks=args.ranks)
            print(f"[local_steps] {title}: {TASKS[task].measure} {found['curve'][-1][TASKS[task].measure]:.4f}", flush=True)


def links(args) -> None:
    with Hosts("local-steps", HOSTS, "none") as up:
        for rate, delay in itertools.product(args.rates, args.delays):
            up("rate", rate)
            up("delay", f"{delay:g}")
            which = name_of(rate, delay)
            for task, method, label, out in missing(args, which):
                if method.endswith(LONGER):
                    continue
                _, library, arguments = methods()[method]
                settled, turn = lengths_of(library, arguments)
                # Few with an exchange in each over Horovod: on slow links a step takes seconds.
                steps = args.steps or settled + (2 * TURNS * turn or {"alone": 200}.get(library, 30))
                options = options_of(args, task, method, SEED, steps, out, True) | {"settled": settled}
                options |= {"turn": turn} if turn else {}
                env = OUR_ENVIRONMENT if method == DEFAULT else {}
                try:
                    launcher = "horovodrun --gloo" if library in ("horovod", "grace_ext") else "torchrun"
                    Job(up, launcher, HOSTS, [WORKER, json.dumps(options)], env=env).end(args.timeout)
                except JobFailed as error:
                    raise RunFailed(f"{task}, {label}, {which}: {error}") from error
                found = complete(out, label, options, ranks=HOSTS, rate=rate, delay=delay, env=env)
                print(f"[local_steps] {task}, {label}, {which}: {found['ms_per_step']:.1f} ms a step", flush=True)


def page(args) -> None:
    print(write_page(args.results, args.transformers, args.out))


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    trains = commands.add_parser("run", help="train, and keep the losses")
    trains.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    trains.add_argument("--ranks", type=int, default=4)
    limited = commands.add_parser("links", help="measure steps on hosts with limited links")
    limited.add_argument("--rates", nargs="+", default=["10mbit", "100mbit", "1gbit"], help="as for mpirun/hosts")
    limited.add_argument("--delays", nargs="+", type=float, default=[0, 20, 100], help="milliseconds from host to host")
    for command in (trains, limited):
        command.add_argument("--data", required=True, help="folder of the texts and of Fashion-MNIST")
        command.add_argument("--tasks", nargs="+", default=["gpt"], choices=TASKS)
        command.add_argument("--methods", nargs="+", default=list(methods()), choices=methods())
        command.add_argument("--steps", type=int, help="for a trial, with another --results")
        command.add_argument("--timeout", type=float, default=7200, help="seconds of one run")
    writes = commands.add_parser("page", help="write the section of docs/local-steps.md")
    writes.add_argument("--out", default=os.path.join(ROOT, "docs"), help="folder of local-steps.md and its plot")
    writes.add_argument("--transformers", default=TRANSFORMERS, help="folder of the results of benchmarks/transformer.py")
    for command in commands.choices.values():
        command.add_argument("--results", default=RESULTS)
    args = parser.parse_args()
    if args.command != "page":
        args.data, args.results = os.path.abspath(args.data), os.path.abspath(args.results)
        os.makedirs(args.results, exist_ok=True)
    {"run": run, "links": links, "page": page}[args.command](args)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except RunFailed as error:
        sys.exit(f"[local_steps] error: {error}")
