"""Local steps: loss against tokens, bytes and seconds, method by method; writes the section of docs/local-steps.md.

    python benchmarks/local_steps.py run --data DIR --seeds 0 1 2
    python benchmarks/local_steps.py links --data DIR --rates 10mbit 100mbit 1gbit --delays 0 20 100
    python benchmarks/local_steps.py page

`run` trains on this machine and keeps the losses; `links` measures a few rounds on four hosts with limited links, which needs
root, for mpirun/hosts. Each run's result is a file in benchmarks/results/local-steps, and a run whose result is there is not
repeated. The tasks are those of benchmarks/transformer.py, and so are the runs with an exchange in each step, which have the same
model, data and batches.
"""

import argparse
import dataclasses
import glob
import itertools
import json
import os
import statistics
import sys
from collections.abc import Iterator

from _hosts import Hosts, Job, JobFailed
from _lib import ROOT, SHARED_CORES, RunFailed, as_markdown, launch
from _page import keep, part_of, read_part, write_section
from _transformer_results import DENSE
from _transformer_results import read as runs_of_transformer
from _transformer_tasks import TASKS

WORKER = os.path.join(ROOT, "benchmarks", "_local_steps_worker.py")
RESULTS = os.path.join(ROOT, "benchmarks", "results", "local-steps")
TRANSFORMERS = os.path.join(ROOT, "benchmarks", "results", "transformers")
HOSTS, SEED = 4, 0
LENGTHS = (5, 15, 30, 100)  # local steps in a round
FP16 = "horovod-fp16"
#: In the plots.
SHOWN = (DENSE, "default", "fedavg-5", "adam-5", "senders-5", "fedavg-30", "sparseloco-30", "senders-30", "adam-30")
#: What the published SparseLoCo sends: 12 bits for a position among 4,096, and 2 for the value, of one element in 64.
NOTE = f"""\
Worse: than float32 with the same seeds. Times fewer bytes: than float32 in each step; in an exchange: than float32 as often as the
method exchanges, headers included. SparseLoCo's published format, 12 bits for a position and 2 for a value, sends
{64 * 32 / 14:.0f} times fewer in an exchange."""


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
        senders = {"steps": steps, "senders": True}
        found[f"senders-{steps}"] = (f"SparseLoCo, mean over senders, H = {steps}", "local", senders)
        found[f"ramp-{steps}"] = (
            f"SparseLoCo, mean over senders, short rounds at first, H = {steps}",
            "local",
            {**senders, "ramp": 1},
        )
        found[f"fedavg-adam-{steps}"] = (
            f"plain averaging, LocalAdamW, H = {steps}",
            "local",
            {"preset": "fedavg", "steps": steps, "local_adamw": True},
        )
        found[f"adam-{steps}"] = (
            f"SparseLoCo, root mean over senders, LocalAdamW, H = {steps}",
            "local",
            {**senders, "root": True, "local_adamw": True},
        )
        streaming = {"steps": steps, "fragments": min(4, steps // 2), "delay": 1, "keep": 0.5}
        found[f"streaming-{steps}"] = (f"SparseLoCo, streaming, H = {steps}", "local", streaming)
    return found


def path_of(folder: str, task: str, method: str, which: str) -> str:
    """Name a result. which: "seed0", …, or the links."""
    return os.path.join(folder, f"{task}_{method}_{which}.json")


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


def run(args) -> None:
    for seed in args.seeds:
        for task, method, label, out in missing(args, f"seed{seed}"):
            if methods()[method][1] != "local":
                print(f"[local_steps] {label}: run benchmarks/transformer.py, whose results are shown", flush=True)
                continue
            options = options_of(args, task, method, seed, args.steps or TASKS[task].steps, out, False)
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
                steps = args.steps or max(20, 3 * methods()[method][2].get("steps", 1))
                options = options_of(args, task, method, SEED, steps, out, True)
                try:
                    Job(up, "horovodrun --gloo", HOSTS, [WORKER, json.dumps(options)]).end(args.timeout)
                except JobFailed as error:
                    raise RunFailed(f"{task}, {label}, {which}: {error}") from error
                found = complete(out, label, options, ranks=HOSTS, rate=rate, delay=delay)
                print(f"[local_steps] {task}, {label}, {which}: {found['ms_per_step']:.1f} ms a step", flush=True)


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


@dataclasses.dataclass
class Measured:
    """What was measured of a method on a task. runs: by seed. milliseconds: of a step, by the name of the links."""

    label: str
    runs: dict[int, dict]
    milliseconds: dict[str, float]

    def steps_to_the_end_of(self, dense: "Measured", measure: str) -> float | None:
        """Return the mean number of steps until a run is as good as the dense one of its seed is at its end; None if one is not."""
        reached = [
            steps_to(found["curve"], measure, dense.runs[seed]["curve"][-1][measure])
            for seed, found in self.runs.items()
            if seed in dense.runs
        ]
        return None if not reached or None in reached else statistics.mean(reached)


def measured(args, task: str) -> dict[str, Measured]:
    """Read what there is of a task, by method."""
    per_step, found = runs_of_transformer(task, args.transformers), {}
    for method, (label, library, _) in methods().items():
        runs, milliseconds = {}, {}
        if library != "local" and method in per_step:
            runs = dict(per_step[method].runs)
        for path in sorted(glob.glob(path_of(args.results, task, method, "*"))):
            with open(path) as file:
                result = json.load(file)
            which = os.path.basename(path)[:-5].rsplit("_", 1)[1]
            if which.startswith("seed"):
                runs[int(which[4:])] = result
            else:
                milliseconds[which] = result["ms_per_step"]
        if runs:
            found[method] = Measured(label, runs, milliseconds)
    return found


def page(args) -> None:
    text, plotted = "", {}
    for task in TASKS:
        found = measured(args, task)
        if any(methods()[method][1] == "local" for method in found):
            plotted[task] = found
            text += f"### {TASKS[task].label}\n\n{tables(found, TASKS[task].measure)}\n"
    if plotted:
        draw(plotted, os.path.join(args.out, "local-steps.png"))
        results = [run for found in plotted.values() for method in found.values() for run in method.runs.values()]
        dates, machines = (
            {run.get(key, "") for run in results if run.get("library") == "local"} for key in ("date", "machine")
        )
        text = f"""\
Written by `benchmarks/local_steps.py`; do not edit.

![loss against tokens, bytes and seconds](local-steps.png)

{text.rstrip()}

Local steps measured on {" and ".join(sorted(dates))} on {" and ".join(sorted(machines))}, all ranks on the same cores, by
`python benchmarks/local_steps.py run --data DIR`; rows with an exchange in each step are those of [transformers.md](transformers.md).
"""
    print(write_section(args.out, "local-steps", "Measurements", text, "local-steps.md"))


def fewer_bytes(run: dict) -> tuple[float, float]:
    """How many times fewer bytes a rank has sent than with float32 in each step, and than with float32 as often as it did."""
    once = 4 * run["parameters"] / run["curve"][-1]["bytes_sent"]
    return once * run["curve"][-1]["step"], once * exchanges(run)


def exchanges(run: dict) -> int:
    """How often a run has exchanged its whole model."""
    arguments = run.get("arguments", {})  # none: an exchange in each step
    length, ramp = arguments.get("steps", 1), arguments.get("ramp")
    made, left = 0, run["curve"][-1]["step"]
    while left > 0:
        made, left = made + 1, left - (min(ramp * (made + 1), length) if ramp else length)
    return made


def tables(found: dict[str, Measured], measure: str) -> str:
    """The loss and the bytes of each method, and how long it takes on each link to be as good as Horovod float32 at its end."""
    dense = found.get(DENSE)
    rows = [
        ["method", measure, "seeds", "worse than float32, %", "times fewer bytes", "in an exchange", "steps to the same"]
    ]
    for method in found.values():
        ends = [run["curve"][-1] for run in method.runs.values()]
        mean = statistics.mean(end[measure] for end in ends)
        fewer, in_exchange = zip(*map(fewer_bytes, method.runs.values()), strict=True)
        worse, needed = "", None
        if dense and (both := dense.runs.keys() & method.runs.keys()):
            base, own = (statistics.mean(one.runs[seed]["curve"][-1][measure] for seed in both) for one in (dense, method))
            worse = f"{100 * (own / base - 1) * (1 if measure == 'loss' else -1):+.2f}"
            needed = method.steps_to_the_end_of(dense, measure)
        rows.append(
            [
                method.label,
                f"{mean:.4f}",
                str(len(ends)),
                worse,
                f"{statistics.mean(fewer):,.1f}",
                f"{statistics.mean(in_exchange):.1f}",
                "not reached" if needed is None else f"{needed:.0f}",
            ]
        )
    text = as_markdown(rows) + f"\n\n{NOTE}"
    links = sorted({name for method in found.values() for name in method.milliseconds}, key=_by_rate)
    if links:
        text += (
            "\n\nMilliseconds a step / seconds to the same, by the rate of the links and the delay from host to host:\n\n"
        )
        rows = [["method", *links]]
        for method in found.values():
            needed = method.steps_to_the_end_of(dense, measure) if dense else None
            cells = [method.milliseconds.get(name) for name in links]
            rows.append(
                [
                    method.label,
                    *(
                        "" if cell is None else f"{cell:.1f} / {'–' if needed is None else f'{cell * needed / 1000:,.0f}'}"
                        for cell in cells
                    ),
                ]
            )
        text += as_markdown(rows)
    return text + "\n"


def _by_rate(name: str) -> tuple[float, float]:
    rate, delay = name.rsplit("-", 1)
    number, unit = rate[:-4], rate[-4:]
    return float(number) * {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}[unit], float(delay.removesuffix("ms"))


def draw(tasks: dict[str, dict[str, Measured]], path: str) -> None:
    """Draw the loss of each task against steps, bytes and, on the link that most methods were measured on, seconds."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(len(tasks), 3, figsize=(14, 4 * len(tasks)), layout="constrained", squeeze=False)
    for (task, found), (by_steps, by_bytes, by_seconds) in zip(tasks.items(), axes, strict=True):
        names = [name for method in found.values() for name in method.milliseconds]
        link = max(sorted(set(names), key=_by_rate), key=names.count) if names else None
        for number, method in enumerate(SHOWN):
            if method not in found:
                continue
            one = found[method]
            curve = next(run["curve"] for _, run in sorted(one.runs.items()))
            scores = [point[TASKS[task].measure] for point in curve]
            look = {"color": f"C{number}", "label": one.label, "marker": ".", "linewidth": 1}
            by_steps.plot([point["step"] for point in curve], scores, **look)
            by_bytes.plot([point["bytes_sent"] / 1e6 for point in curve], scores, **look)
            if link in one.milliseconds:
                by_seconds.plot([point["step"] * one.milliseconds[link] / 1000 for point in curve], scores, **look)
        by_steps.set(
            xlabel="steps of a rank", ylabel=f"{TASKS[task].measure}, held-out, first seed", title=TASKS[task].label
        )
        by_bytes.set(xlabel="MB that a rank has sent", xscale="log")
        by_seconds.set(xlabel=f"seconds with links of {link}", xscale="log")
        by_seconds.set_visible(link is not None)
        for ax in (by_steps, by_bytes, by_seconds):
            ax.grid(alpha=0.3)
        by_steps.legend(fontsize=8)
    figure.savefig(path, dpi=110)
    plt.close(figure)


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
