"""The section of benchmarks/cluster.py in docs/benchmarks.md, and its plot."""

import statistics

from _cluster_results import (
    BASELINE,
    CONFIGURATIONS,
    FEWEST,
    MODELS,
    OURS,
    OVER_DDP,
    POINTS,
    RATES,
    SIDE_BY_SIDE,
    WITH_HOROVOD,
    Results,
)
from _lib import as_markdown, size

CUT = " †"
LABELS = {config: label for config, (label, *_) in CONFIGURATIONS.items()}


def document(results: Results) -> str:
    runs = [
        (config, results.get(model, rate, config)["options"])
        for model in results.models()
        for rate in results.rates(model)
        for config in results.configs(model, rate)
    ]
    hosts = runs[0][1]["hosts"]
    started = f"Horovod with {commands(runs, ours=False)} and grace_ext on Horovod with {commands(runs, ours=True)}"
    parts = [
        f"Written by `benchmarks/cluster.py`; do not edit. {hosts} hosts, which are network namespaces on one machine "
        "(`mpirun/hosts`, [cluster.md](cluster.md)), with links of 100 Mbit/s, of 1 Gbit/s, and without a limit; one rank "
        "per host; 16 samples per rank and step; the same initial weights, order of data and learning rates in all runs. "
        f"{started} were each started in the way that is fastest for them here (`mpirun, ring`: Open MPI with its ring "
        "algorithm for allreduce), torch DDP over Gloo.",
        "![accuracy against time](cluster.png)",
        bars(results.verdicts(), OURS),
        bars(results.verdicts_over_ddp(), OVER_DDP),
    ]
    for model in results.models():
        target = results.target(model)
        parts.append(f"### {MODELS[model]}")
        parts += [f"{RATES[rate]}:\n\n{as_markdown(table(results, model, rate, target))}" for rate in results.rates(model)]
        parts.append(neighbours(results, model))
    parts.append(NOTES)
    parts.append(f"{measured(results)}, by `python benchmarks/cluster.py --data DIR`.")
    return "\n\n".join(part for part in parts if part) + "\n"


def commands(runs: list[tuple[str, dict]], ours: bool) -> str:
    """Say which variables and launchers the runs on Horovod were started with, and of which models if these differ."""
    models: dict[str, list[str]] = {}
    for config, options in runs:
        if options["library"] == "horovod" and (config in OURS) == ours:
            variables = [f"{name}={value}" for name, value in options.get("env", {}).items()]
            of = models.setdefault(" ".join([*variables, options["launcher"]]), [])
            of += {MODELS[options["model"]].partition(",")[0]}.difference(of)
    return " or ".join(f"`{line}`" + f" ({' and '.join(of)})" * (len(models) > 1) for line, of in models.items())


NOTES = f"""\
- All ranks share the machine's cores, so computation on one rank slows down the others. *Compute* is the median step
  without an exchange while all ranks compute, one number for each model. *Codec* is the time of grace_ext's stages
  (selecting, encoding, residual, decoding); a part of it overlaps with backward. *Wire* is the rest of the step: the links,
  waiting for other ranks, the internal work of Horovod or DDP, and their conversion to fp16 or factors.
- *Core* is the time for which a rank keeps a core busy in a step, including busy waiting.
- Bytes are counted at the network interface, per rank and step, including headers and Horovod's coordination. The
  allreduces by which grace_ext measures the link for a warning were turned off (`GRACE_EXT_WARN=0`).
- † would have taken too long: the step is the median of some tens of steps, and the accuracies are those of the
  same steps without a rate limit, where the mathematics is the same.
- *Seconds to accuracy*: until the best accuracy of Horovod fp16 without a limit, less {100 * POINTS:.1f} points, is reached.
  The time of evaluations is not counted.
- *Side by side*: a single job in which the configurations take turns, some steps each, to resolve small differences. It
  leaves out configurations that were much slower. *With Horovod*: all configurations use the launcher that is fastest for
  Horovod; this job compares auto with Horovod. Under `horovodrun --gloo`, where instances of one configuration differ
  less, auto is compared with grace_ext's other choices. The target applies to the worse of both. Cells have the mean of
  several instances of each configuration and their range; the best choice for an instance is determined from the other
  instances.
- DDP has gradient_as_bucket_view=True in all rows, which spares a copy. Its PowerSGD uses one bucket, because over Gloo its
  hook fails with several. It compresses from the second step on. *Fewest bytes* is `{FEWEST}` ([choosing.md](choosing.md)).
- The text model trains with Adam, so that grace_ext's default there is Adam's. Its side by side
  leaves out sharded and auto. Without a limit, its instances of Horovod alone differ by up to twice from day to day, and the side by
  side is what counts there. Its embedding has a dense gradient in all configurations. Its accuracy is how often the likeliest of the 1,000
  most frequent words is the next word."""


#: What the README shows: a slow link, a link without a limit, and a model that trains with Adam.
SUMMARY = (("mlp", "100mbit"), ("cnn", "none"), ("text", "100mbit"))
HOROVOD = {"horovod-fp16": "fp16", "horovod-fp32": "fp32"}


def summary(results: Results) -> str:
    """Write the table of the README."""
    default = LABELS["allgather"].removesuffix(" (allgather)")
    rows = [
        [
            "model",
            "links",
            "ms per step: Horovod, the faster of fp16 and fp32",
            LABELS["ddp-powersgd"],
            default,
            "seconds to the same accuracy: Horovod",
            default,
        ]
    ]
    for model, rate in SUMMARY:
        measured_here = [config for config in HOROVOD if results.get(model, rate, config)]
        if not measured_here or not results.get(model, rate, "allgather"):
            continue
        best = min(measured_here, key=lambda config: results.step(model, rate, config))
        rows.append(
            [
                MODELS[model],
                RATES[rate],
                f"{_step(results, model, rate, best)} ({HOROVOD[best]})",
                _step(results, model, rate, "ddp-powersgd"),
                _step(results, model, rate, "allgather"),
                *(_until(results, model, rate, config, "{:,.0f}") for config in (best, "allgather")),
            ]
        )
    return "\n\n".join(
        [
            as_markdown(rows),
            "Four hosts (network namespaces with links limited by `tc`) share two cores, so copying less saves time even "
            "without a link limit. Horovod and grace_ext each run under the launcher and with the variables that make "
            "them fastest. †: the median of a few dozen steps; the accuracies are those of the same steps without a limit. "
            "All models, links and methods, bytes and curves: [docs/benchmarks.md](docs/benchmarks.md#time-to-accuracy).",
            f"{measured(results)}, by `python benchmarks/cluster.py --data DIR --readme README.md`.",
        ]
    )


def _step(results: Results, model: str, rate: str, config: str) -> str:
    """Format the milliseconds of a step; empty where they were not measured."""
    if not results.get(model, rate, config):
        return ""
    return milliseconds(results.step(model, rate, config)) + CUT * results.is_cut(model, rate, config)


def _until(results: Results, model: str, rate: str, config: str, form: str) -> str:
    """Format the seconds until the accuracy that is compared; empty where they were not measured."""
    if not results.get(model, rate, config):
        return ""
    seconds = results.seconds_to(model, rate, config)
    return form.format(seconds) if seconds else "not reached" if results.curve(model, rate, config) else ""


def measured(results: Results) -> str:
    """Say when and on which machine, for each model if these differ."""
    found: dict[str, list[str]] = {}
    for model in results.models():
        dates, machines = results.dates(model), " and ".join(results.machines(model))
        days = dates[0] if len(dates) == 1 else f"{dates[0]} to {dates[-1]}"
        found.setdefault(f"on {days} on {machines}", []).append(MODELS[model].partition(",")[0])
    if len(found) == 1:
        return f"Measured {next(iter(found))}"
    return "Measured " + "; ".join(f"{' and '.join(models)} {when}" for when, models in found.items())


def milliseconds(seconds: float) -> str:
    return f"{1000 * seconds:,.0f}" if seconds >= 0.1 else f"{1000 * seconds:.1f}"


def table(results: Results, model: str, rate: str, target: float | None) -> list[list[str]]:
    reached = f"seconds to {target:.1%}" if target else "seconds to accuracy"
    rows = [
        [
            "",
            "ms a step",
            "compute",
            "codec",
            "wire",
            "core",
            "bytes a step",
            "accuracy",
            reached,
            "step against Horovod fp16",
        ]
    ]
    compute = results.compute(model)
    base = results.step(model, rate, BASELINE) if results.get(model, rate, BASELINE) else None
    for config in results.configs(model, rate):
        key = (model, rate, config)
        run, step, codec = results.get(*key), results.step(*key), results.codec(*key)
        curve = results.curve(*key)
        rows.append(
            [
                LABELS[config] + CUT * results.is_cut(*key),
                milliseconds(step),
                milliseconds(compute),
                milliseconds(codec) if run["stages"] else "",
                milliseconds(max(0.0, step - compute - codec)),
                milliseconds(run["core"]),
                size(run["sent"]),
                f"{curve[-1][1]:.2%}" if curve else "",
                _until(results, *key, "{:.1f}") if target else "",
                f"1/{base / step:.1f}" if base and step < base else f"{step / base:.2f}" if base else "",
            ]
        )
    return rows


def neighbours(results: Results, model: str) -> str:
    columns = [
        (RATES[rate] + title, steps)
        for rate in results.rates(model)
        for title, comparison in ((", with Horovod", WITH_HOROVOD), ("", SIDE_BY_SIDE))
        if (steps := results.side_by_side(model, rate, comparison))
    ]
    rows = [["side by side, ms a step", *(title for title, _ in columns)]]
    for config in CONFIGURATIONS:
        steps = [of.get(config) for _, of in columns]
        if any(steps):
            rows.append([LABELS[config], *(spread(instances) if instances else "" for instances in steps)])
    return as_markdown(rows) if columns else ""


def spread(instances: list[float]) -> str:
    """Format the mean and the range."""
    least, most = milliseconds(min(instances)), milliseconds(max(instances))
    return milliseconds(statistics.mean(instances)) + (f" ({least} to {most})" if least != most else "")


def bars(verdicts: list[tuple[str, str, float, dict[str, float]]], configs: tuple[str, ...]) -> str:
    """Make a table of what is required of some configurations and what was measured."""
    rows = [["", "against", "at most", *(LABELS[config] for config in configs)]]
    for what, against, most, measured in verdicts:
        cells = [
            f"{value:.3f}, {'met' if value <= most else '**missed**'}" if (value := measured.get(config)) else ""
            for config in configs
        ]
        rows.append([what, against, f"{most:.3f}", *cells])
    return as_markdown(rows) if len(rows) > 1 else ""


def plot(results: Results, file: str) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    models = results.models()
    rates = [rate for rate in RATES if any(rate in results.rates(model) for model in models)]
    figure, axes = plt.subplots(
        len(models), len(rates), figsize=(4.2 * len(rates), 3.2 * len(models) + 0.8), layout="constrained", squeeze=False
    )
    handles = {}
    for row, model in zip(axes, models, strict=True):
        for ax, rate in zip(row, rates, strict=True):
            for number, config in enumerate(CONFIGURATIONS):
                if results.get(model, rate, config) and (curve := results.curve(model, rate, config)):
                    style = ":" if results.is_cut(model, rate, config) else "-"
                    seconds, scores = zip(*curve, strict=True)
                    [handles[LABELS[config]]] = ax.plot(
                        seconds, [100 * score for score in scores], style, color=f"C{number}", marker="."
                    )
            if target := results.target(model):
                ax.axhline(100 * target, color="grey", linewidth=0.8)
            ax.set(
                xscale="log",
                title=f"{MODELS[model].split(',')[0]}, {RATES[rate]}",
                xlabel="seconds",
                ylabel="test accuracy (%)",
            )
            ax.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
            ax.grid(True, alpha=0.3, which="both")
    figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=4, frameon=False)
    figure.savefig(file, dpi=110)
    plt.close(figure)
