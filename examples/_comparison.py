"""What the comparisons share: their arguments, and the tables and plots that they write."""

import argparse
import datetime
import importlib.metadata
import os
import platform
import sys

from _launch import EXAMPLE, Run, train

import grace_ext
from grace_ext.policy import DEFAULT_SPEC

HOROVOD = ("Horovod", "horovod")
LINKS = {"100 Mbit/s": 100e6, "1 Gbit/s": 1e9, "10 Gbit/s": 10e9}


def machine(packages=(("PyTorch", "torch"), HOROVOD)) -> str:
    """Describe the processor, cores and versions. packages: (title, name of the distribution), in addition to grace_ext."""
    name = platform.processor() or platform.machine()
    if os.path.exists("/proc/cpuinfo"):
        with open("/proc/cpuinfo") as info:
            lines = info.read().split("\n\n")[0].splitlines()
        core = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in lines)}
        name = core.get("model name", name)
        if "cpu family" in core:  # virtual machines' names leave out which processor it is
            name += f" (family {core['cpu family']}, model {core['model']})"
    versions = ", ".join(
        f"{title} {importlib.metadata.version(package)}" for title, package in (*packages, ("grace_ext", "grace_ext"))
    )
    cores = len(os.sched_getaffinity(0))
    return f"{name}, {cores} core{'s' * (cores > 1)}, CPU only; Python {platform.python_version()}, {versions}"


def size(count: float) -> str:
    """Format a number of bytes with a decimal unit."""
    for unit in ("B", "kB", "MB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} GB"


def measured_table(runs: list[Run]) -> list[list[str]]:
    rows = [["", "test accuracy", "ms per step", "compute", "codec", "exchange", "bytes sent per step", "ratio"]]
    for run in runs:
        times = [1000 * run.seconds[stage] for stage in ("compute", "codec", "exchange")]
        rows.append(
            [
                run.label,
                f"{100 * run.last['accuracy']:.2f} %",
                f"{sum(times):.1f}",
                *(f"{time:.1f}" for time in times),
                size(run.bytes_per_step),
                f"{run.last['ratio']:.0f}×",
            ]
        )
    return rows


def projected_table(runs: list[Run]) -> list[list[str]]:
    rows = [["projected ms per step at", *LINKS]]
    compute = min(run.seconds["compute"] for run in runs)  # the work is the same; the differences are noise
    for run in runs:
        seconds = [compute + run.seconds["codec"] + 8 * run.bytes_per_step / speed for speed in LINKS.values()]
        rows.append([run.label, *(f"{1000 * second:.1f}" for second in seconds)])
    return rows


def as_text(rows: list[list[str]]) -> str:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = [
        "  ".join(
            cell.rjust(width) if column else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    ]
    return "\n".join([lines[0], "-" * len(lines[0]), *lines[1:]])


def as_markdown(rows: list[list[str]]) -> str:
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join([lines[0], "|---|" + "--:|" * (len(rows[0]) - 1), *lines[1:]])


def around_markers(path: str, markers: tuple[str, str]) -> tuple[str, str]:
    """Return the text of a file up to the first marker and from the second one on. Raises ValueError, OSError."""
    with open(path, encoding="utf-8") as file:
        before, begin, rest = file.read().partition(markers[0])
    _, end, after = rest.partition(markers[1])
    if not (begin and end):
        raise ValueError(f"{path} lacks the markers {markers[0]} and {markers[1]}")
    return before + begin, end + after


def replace_between(path: str, markers: tuple[str, str], text: str) -> None:
    """Replace the lines between two markers in a file. Raises ValueError, OSError."""
    before, after = around_markers(path, markers)
    with open(path, "w", encoding="utf-8") as file:
        file.write(f"{before}\n{text}{after}")


def plot(runs: list[Run], folder: str) -> list[str]:
    """Plot accuracy against epochs and against bytes sent; return the files."""
    try:
        import matplotlib
    except ImportError:
        print("matplotlib is not installed: no plots", file=sys.stderr)
        return []
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    files = []
    axes = {
        "epochs": ("epochs", lambda entry: entry["epoch"]),
        "bytes": ("bytes sent per rank since the start (MB, logarithmic)", lambda entry: entry["bytes_sent"] / 1e6),
    }
    for name, (title, x_of) in axes.items():
        figure, ax = plt.subplots(figsize=(7.5, 4.5), layout="constrained")
        for run, marker, style in zip(runs, "os^D", ("-", "--", "-", ":"), strict=False):
            ax.plot(
                [x_of(entry) for entry in run.history],
                [100 * entry["accuracy"] for entry in run.history],
                style,
                marker=marker,
                label=run.label,
            )
        if name == "bytes":
            ax.set_xscale("log")
            ax.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
        ax.set(xlabel=title, ylabel="test accuracy (%)", title="Fashion-MNIST, the same seed for all runs")
        ax.grid(True, alpha=0.3, which="both")
        figure.legend(loc="outside lower center", ncols=2, frameon=False)
        files.append(os.path.join(folder, f"accuracy_{name}.png"))
        figure.savefig(files[-1], dpi=150)
        plt.close(figure)
    return files


def make_training_parser(description: str, epochs: int, ranks: int = 2) -> argparse.ArgumentParser:
    """Make a parser with the options of `training_options`, and the number of ranks."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--data", required=True, help="folder of the data set (see mpirun/fetch_fashion_mnist.py)")
    parser.add_argument("--ranks", type=int, default=ranks)
    parser.add_argument("--epochs", type=int, default=epochs, help="epochs on Fashion-MNIST (default: %(default)s)")
    parser.add_argument("--train-samples", type=int, default=60000)
    return parser


def make_parser(description: str, epochs: int, markers: tuple[str, str]) -> argparse.ArgumentParser:
    """Make the parser of a comparison on Fashion-MNIST."""
    parser = make_training_parser(description, epochs)
    parser.add_argument("--out", required=True, help="folder for the table, the plots and the logs")
    parser.add_argument("--spec", default=DEFAULT_SPEC, help="compression on Fashion-MNIST (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--timeout", type=float, default=900, help="seconds after which a run is stopped")
    parser.add_argument("--readme", help=f"replace the text between {markers[0]} and {markers[1]} in this file")
    return parser


def parse_args(parser: argparse.ArgumentParser, markers: tuple[str, str], specs: tuple[str, ...] = ("spec",)):
    """Parse and check the arguments. `changed` holds those that influence the figures and are not the default.

    specs: names of the arguments that are specs.
    """
    args = parser.parse_args()
    try:
        for name in specs:
            grace_ext.compressor(getattr(args, name))
        if "memory" in args:
            grace_ext.memory(args.memory)
        if args.readme:
            around_markers(args.readme, markers)
    except (grace_ext.GraceError, ValueError, OSError) as error:
        parser.error(str(error))
    args.changed = {
        name: value
        for name, value in vars(args).items()
        if name not in ("data", "out", "readme", "timeout") and value != parser.get_default(name)
    }
    return args


def training_options(args, seed: int, **others) -> list[str]:
    """Return the options of an example on Fashion-MNIST. others: values of options that not all examples have."""
    options = {
        "data": os.path.abspath(args.data),
        "epochs": args.epochs,
        "train-samples": args.train_samples,
        "seed": seed,
        **others,
    }
    return [text for name, value in options.items() for text in (f"--{name}", str(value))]


def train_all(
    methods: dict[str, tuple[str, str]], args, example: str = EXAMPLE, env=None, launcher=None, own_env=None
) -> list[Run]:
    """Train with each method. Raises RunFailed.

    methods: label -> name of the log file, and the example's --compression. env: variables of all; own_env: of some, by label.
    """
    os.makedirs(args.out, exist_ok=True)
    runs = []
    for number, (label, (name, compression)) in enumerate(methods.items(), 1):
        print(f"\n[{number}/{len(methods)}] {label}", file=sys.stderr, flush=True)
        options = training_options(args, args.seed, compression=compression, memory=args.memory)
        log_file = os.path.join(args.out, f"{name}.jsonl")
        variables = {**(env or {}), **(own_env or {}).get(label, {})}
        runs.append(train(label, options, log_file, args.ranks, args.timeout, example, variables, launcher))
    return runs


def command_of(script: str, args, usual: str) -> str:
    """Return the command that reproduces the figures: `usual`, or the script with the changed arguments."""
    changed = "".join(
        f" --{name.replace('_', '-')}" + ("" if value is True else f" {value}") for name, value in args.changed.items()
    )
    return f"python examples/{script} --data DIR --out DIR{changed}" if changed else usual


def publish(tables: list[tuple[list[list[str]], str]], plots: list[str], args, made: str, markers: tuple[str, str]) -> None:
    """Write tables with their captions, also into the README if that is wanted, and print them.

    plots: files that are named with them; made: on which machine and by which command.
    """
    paragraphs = [text for rows, caption in tables for text in (as_markdown(rows), caption)]
    text = "\n\n".join([*paragraphs, f"Measured on {datetime.date.today().isoformat()} on {made}."]) + "\n"
    files = [os.path.join(args.out, "comparison.md"), *plots]
    with open(files[0], "w", encoding="utf-8") as file:
        file.write(text)
    if args.readme:
        replace_between(args.readme, markers, text)
    for rows, caption in tables:
        print(f"\n{as_text(rows)}\n\n{caption}")
    print(f"\nwritten: {', '.join(files)}")


def publish_runs(runs: list[Run], args, captions: tuple[str, str], made: str, markers: tuple[str, str]) -> None:
    """Publish the two tables and the plots of the same training with several methods."""
    tables = list(zip((measured_table(runs), projected_table(runs)), captions, strict=True))
    publish(tables, plot(runs, args.out), args, made, markers)
