"""Local steps: loss against tokens, bytes and seconds, method by method; writes the section of docs/local-steps.md.

    python benchmarks/local_steps.py run --data DIR --seeds 0 1 2
    python benchmarks/local_steps.py links --data DIR --rates 10mbit 100mbit 1gbit
    python benchmarks/local_steps.py page

`run` trains on this machine and keeps the losses; `links` measures a few rounds on four hosts with limited links, which needs
root, for mpirun/hosts. Each run's result is a file in benchmarks/results/local-steps, and a run whose result is there is not
repeated. The tasks are those of benchmarks/transformer.py.
"""

import argparse
import datetime
import glob
import json
import os
import statistics
import sys

from _hosts import Hosts, Job, JobFailed
from _lib import ROOT, SHARED_CORES, RunFailed, as_markdown, launch, machine
from _page import commit, write_section
from _transformer_tasks import TASKS

WORKER = os.path.join(ROOT, "benchmarks", "_local_steps_worker.py")
RESULTS = os.path.join(ROOT, "benchmarks", "results", "local-steps")
HOSTS, SEED = 4, 0
LENGTHS = (5, 15, 30, 100)  # local steps in a round
DENSE, FP16 = "horovod-fp32", "horovod-fp16"


def methods() -> dict[str, tuple[str, str, dict]]:
    """List the methods: name of the result -> label, library and its arguments."""
    found = {
        DENSE: ("Horovod float32, each step", "horovod", {"compression": "none"}),
        FP16: ("Horovod fp16, each step", "horovod", {"compression": "fp16"}),
        "default": ("grace_ext, default, each step", "grace_ext", {}),
    }
    for steps in LENGTHS:
        found[f"fedavg-{steps}"] = (f"plain averaging, H = {steps}", "local", {"preset": "fedavg", "steps": steps})
        found[f"diloco-{steps}"] = (f"DiLoCo, H = {steps}", "local", {"preset": "diloco", "steps": steps})
        found[f"sparseloco-{steps}"] = (f"SparseLoCo, H = {steps}", "local", {"preset": "sparseloco", "steps": steps})
        found[f"ramp-{steps}"] = (f"the same, short rounds at first, H = {steps}", "local", {"steps": steps, "ramp": 1})
        streaming = {"steps": steps, "fragments": min(4, steps // 2), "delay": 1, "keep": 0.5}
        found[f"streaming-{steps}"] = (f"SparseLoCo, streaming, H = {steps}", "local", streaming)
    return found


def path_of(folder: str, task: str, method: str, which: str) -> str:
    """Name a result. which: "seed0", …, or the rate of the links."""
    return os.path.join(folder, f"{task}_{method}_{which}.json")


def options_of(args, task: str, method: str, seed: int, steps: int, out: str, measure: bool) -> dict:
    _, library, arguments = methods()[method]
    given = {"task": task, "seed": seed, "steps": steps, "library": library, "arguments": arguments, "measure": measure}
    return {**given, "data": args.data, "out": out}


def keep(out: str, label: str, options: dict, **more) -> dict:
    """Complete a result with what it was made with."""
    with open(out) as file:
        found = json.load(file)
    described = {key: options[key] for key in ("task", "seed", "steps", "library", "arguments")}
    found = {"label": label, **described, **more, **found}
    found |= {"date": datetime.date.today().isoformat(), "commit": commit(), "machine": machine()}
    with open(out, "w") as file:
        json.dump(found, file, indent=1)
        file.write("\n")
    return found


def missing(args, which: str):
    """Yield (task, method, label, path of the result) of runs without a result."""
    for task in args.tasks:
        for method in args.methods:
            out = path_of(args.results, task, method, which)
            if not os.path.exists(out):
                yield task, method, methods()[method][0], out


def run(args) -> None:
    for seed in args.seeds:
        for task, method, label, out in missing(args, f"seed{seed}"):
            options = options_of(args, task, method, seed, args.steps or TASKS[task].steps, out, False)
            title = f"{task}, {label}, seed {seed}"
            launch(title, WORKER, [json.dumps(options)], args.ranks, args.timeout, SHARED_CORES)
            found = keep(out, label, options, ranks=args.ranks)
            print(f"[local_steps] {title}: {TASKS[task].measure} {found['curve'][-1][TASKS[task].measure]:.4f}", flush=True)


def links(args) -> None:
    with Hosts("local-steps", HOSTS, "none") as up:
        for rate in args.rates:
            up("rate", rate)
            for task, method, label, out in missing(args, rate):
                steps = args.steps or max(20, 3 * methods()[method][2].get("steps", 1))
                options = options_of(args, task, method, SEED, steps, out, True)
                try:
                    Job(up, "horovodrun --gloo", HOSTS, [WORKER, json.dumps(options)]).end(args.timeout)
                except JobFailed as error:
                    raise RunFailed(f"{task}, {label}, {rate}: {error}") from error
                found = keep(out, label, options, ranks=HOSTS, rate=rate)
                print(f"[local_steps] {task}, {label}, {rate}: {found['ms_per_step']:.1f} ms a step", flush=True)


def steps_to(curve: list[dict], measure: str, target: float) -> float | None:
    """Return after how many steps a run was as good as the target, between two evaluations; None if it was not."""
    before = None
    for now in curve:
        reached = now[measure] <= target if measure == "loss" else now[measure] >= target
        if reached and before is None:
            return now["step"]
        if reached:
            share = (target - before[measure]) / (now[measure] - before[measure])
            return before["step"] + share * (now["step"] - before["step"])
        before = now
    return None


def page(args) -> None:
    text = ""
    for task in TASKS:
        rates = sorted(
            {os.path.basename(path)[:-5].split("_")[2] for path in glob.glob(path_of(args.results, task, DENSE, "*"))}
            - {os.path.basename(path)[:-5].split("_")[2] for path in glob.glob(path_of(args.results, task, DENSE, "seed*"))}
        )
        rows = [row for method in methods() if (row := row_of(args.results, task, method, rates))]
        if rows:
            header = ["method", TASKS[task].measure, "times fewer bytes"]
            header += [column for rate in rates for column in (f"ms per step, {rate}", f"seconds to the same, {rate}")]
            text += f"### {TASKS[task].label}\n\n{as_markdown([header, *rows])}\n"
    print(write_section(args.out, "local-steps", "Measurements", text, "local-steps.md"))


def row_of(folder: str, task: str, method: str, rates: list[str]) -> list[str] | None:
    """A row of the page; None where nothing was measured. "The same" is the end of Horovod float32, of the same seed."""
    measure, runs = TASKS[task].measure, seeds_of(folder, task, method)
    if not runs:
        return None
    ends = [found["curve"][-1] for found in runs.values()]
    fewer = [4 * found["parameters"] * found["steps"] / found["bytes_sent"] for found in runs.values()]
    row = [next(iter(runs.values()))["label"], f"{statistics.mean(end[measure] for end in ends):.4f}"]
    row.append(f"{statistics.mean(fewer):.1f}")
    dense = seeds_of(folder, task, DENSE)
    reached = [
        steps_to(found["curve"], measure, dense[seed]["curve"][-1][measure]) for seed, found in runs.items() if seed in dense
    ]
    for rate in rates:
        path = path_of(folder, task, method, rate)
        if not os.path.exists(path):
            row += ["", ""]
            continue
        with open(path) as file:
            milliseconds = json.load(file)["ms_per_step"]
        row.append(f"{milliseconds:.1f}")
        never = not reached or None in reached
        row.append("not reached" if never else f"{milliseconds / 1000 * statistics.mean(reached):.0f}")
    return row


def seeds_of(folder: str, task: str, method: str) -> dict[str, dict]:
    found = {}
    for path in sorted(glob.glob(path_of(folder, task, method, "seed*"))):
        with open(path) as file:
            found[path.rsplit("_", 1)[1]] = json.load(file)
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    trains = commands.add_parser("run", help="train, and keep the losses")
    trains.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    trains.add_argument("--ranks", type=int, default=4)
    limited = commands.add_parser("links", help="measure steps on hosts with limited links")
    limited.add_argument("--rates", nargs="+", default=["10mbit", "100mbit", "1gbit"], help="as for mpirun/hosts")
    for command in (trains, limited):
        command.add_argument("--data", required=True, help="folder of the texts and of Fashion-MNIST")
        command.add_argument("--tasks", nargs="+", default=["gpt"], choices=TASKS)
        command.add_argument("--methods", nargs="+", default=list(methods()), choices=methods())
        command.add_argument("--steps", type=int, help="for a trial, with another --results")
        command.add_argument("--timeout", type=float, default=7200, help="seconds of one run")
    writes = commands.add_parser("page", help="write the section of docs/local-steps.md")
    writes.add_argument("--out", default=os.path.join(ROOT, "docs"), help="folder of local-steps.md")
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
