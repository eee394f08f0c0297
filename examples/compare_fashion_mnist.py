"""Train the example three times from the same seed and compare: Horovod's float32, Horovod's fp16, grace_ext.

    python examples/compare_fashion_mnist.py --data DIR --out DIR

`make demo` calls it. Prints the table and writes it to OUT/comparison.md, with two plots beside it.
"""

import argparse
import collections
import dataclasses
import datetime
import importlib.metadata
import json
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import threading
import time

import grace_ext
from grace_ext.policy import DEFAULT_SPEC

HERE = os.path.dirname(os.path.abspath(__file__))
EXAMPLE = os.path.join(HERE, "pytorch_fashion_mnist.py")
HOROVOD = ("Horovod", "horovod")
LINKS = {"100 Mbit/s": 100e6, "1 Gbit/s": 1e9, "10 Gbit/s": 10e9}
MARKERS = "<!-- demo:begin -->", "<!-- demo:end -->"
#: For more ranks than cores: who waits lets others work, and matrix products have no threads of their own.
SHARED_CORES = {"OMPI_MCA_mpi_yield_when_idle": "1", "OMP_NUM_THREADS": "1"}
_RANK_TAG = re.compile(rb"\[\d+,\d+\]<std(out|err)>: ?")  # put before each line by mpirun
# TensorFlow's, which no setting keeps out; horovodrun too imports it where it is installed.
_NOTICE = re.compile(rb"WARNING: All log messages before absl|I0000 .*oneDNN custom operations are on")


class RunFailed(Exception):
    """A run that ended with an error or not in time; the message shows the end of its output."""


@dataclasses.dataclass
class Run:
    """A finished training. history: what the example logged, one dict per evaluation."""

    label: str
    history: list[dict]

    @property
    def last(self) -> dict:
        return self.history[-1]

    @property
    def seconds(self) -> dict[str, float]:
        """Mean seconds per step of compute, codec and exchange."""
        return self.last["seconds_per_step"]

    @property
    def bytes_per_step(self) -> float:
        return self.last["bytes_sent"] / self.last["steps"]


def train(
    label: str,
    options: list[str],
    log_file: str,
    ranks: int,
    timeout: float,
    example: str = EXAMPLE,
    env: dict[str, str] | None = None,
    launcher=None,
) -> Run:
    """Run an example under horovodrun, or as the launcher says. Raises RunFailed."""
    if os.path.exists(log_file):
        os.remove(log_file)
    command = [*(launcher or horovodrun)(ranks), example, *options, "--log-file", os.path.abspath(log_file)]
    finish(label, command, timeout, env)
    with open(log_file) as log:
        return Run(label, [json.loads(line) for line in log])


def launch(
    label: str, script: str, options: list[str], ranks: int, timeout: float, env: dict[str, str] | None = None
) -> None:
    """Run a script under horovodrun; its progress goes to this terminal. env: set on top. Raises RunFailed."""
    finish(label, [*horovodrun(ranks), script, *options], timeout, env)


def horovodrun(ranks: int) -> list[str]:
    """The command that starts a script on so many ranks, up to the script. Raises RunFailed."""
    launcher = shutil.which("horovodrun", path=os.path.dirname(sys.executable)) or shutil.which("horovodrun")
    if launcher is None:
        raise RunFailed("horovodrun was not found; `make setup` installs it, then `. mpirun/env.sh` finds it")
    return [launcher, "-np", str(ranks), "--start-timeout", "120", sys.executable]


def torchrun(ranks: int) -> list[str]:
    """The same for PyTorch's own launcher."""
    return [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]


def finish(label: str, command: list[str], timeout: float, env: dict[str, str] | None = None) -> None:
    """Run a command to its end; its progress goes to this terminal. env: set on top. Raises RunFailed."""
    status, lines = _run(command, timeout, env or {})
    if status != 0:
        how = f"did not end within {timeout:.0f} seconds" if status is None else f"ended with status {status}"
        tail = "\n".join(f"    {line}" for line in lines)
        raise RunFailed(f"the run {label!r} {how}; the end of its output:\n{tail}\nthe command:\n    " + " ".join(command))


def _run(command: list[str], timeout: float, env: dict[str, str]):
    """(exit status, last lines of the output); the status is None when the time was up."""
    env = {"TF_CPP_MIN_LOG_LEVEL": "3", **os.environ, **env}
    env["PATH"] = os.path.dirname(sys.executable) + os.pathsep + env.get("PATH", "")
    if not sys.stderr.isatty():
        env.setdefault("TQDM_MININTERVAL", "10")  # in a file, each update of the bar is a line
    child = subprocess.Popen(
        command, env=env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True
    )
    late = threading.Event()
    timer = threading.Timer(timeout, lambda: (late.set(), _stop(child)))
    timer.start()
    try:
        lines = _pass_on(child.stdout)
        status = child.wait()
    finally:
        timer.cancel()
        _stop(child)
    return (None if late.is_set() else status), lines


def _pass_on(stream) -> list[str]:
    """Copy bytes to the terminal without mpirun's tags and TensorFlow's notices; return the last lines, without progress
    bars."""
    lines, rest = collections.deque(maxlen=30), b""
    while block := os.read(stream.fileno(), 65536):
        *parts, rest = re.split(rb"(?<=[\r\n])", rest + block)
        for part in parts:
            part = _RANK_TAG.sub(b"", part)
            if _NOTICE.match(part):
                continue
            sys.stderr.buffer.write(part)
            if part.endswith(b"\n") and part.strip():
                lines.append(part.decode(errors="replace").rstrip())
        sys.stderr.buffer.flush()
    if rest.strip():  # a bar that did not come to its end
        sys.stderr.buffer.write(rest + b"\n")
        sys.stderr.buffer.flush()
        lines.append(rest.decode(errors="replace").strip())
    return list(lines)


def _stop(child) -> None:
    """End the launcher, which ends the ranks."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        if child.poll() is None:
            os.killpg(child.pid, number)
            try:
                child.wait(10)
            except subprocess.TimeoutExpired:
                continue


def machine(packages=(("PyTorch", "torch"), HOROVOD)) -> str:
    """Processor, cores and versions; packages: titles and names of distributions, beside grace_ext."""
    name = platform.processor() or platform.machine()
    if os.path.exists("/proc/cpuinfo"):
        with open("/proc/cpuinfo") as info:
            name = next((line.split(":")[1].strip() for line in info if line.startswith("model name")), name)
    versions = ", ".join(
        f"{title} {importlib.metadata.version(package)}" for title, package in (*packages, ("grace_ext", "grace_ext"))
    )
    cores = len(os.sched_getaffinity(0))
    return f"{name}, {cores} core{'s' * (cores > 1)}, CPU only; Python {platform.python_version()}, {versions}"


def size(count: float) -> str:
    """Bytes with a decimal unit."""
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
    compute = min(run.seconds["compute"] for run in runs)  # the work is the same; the rest is the machine's noise
    for run in runs:
        seconds = [compute + run.seconds["codec"] + 8 * run.bytes_per_step / speed for speed in LINKS.values()]
        rows.append([run.label, *(f"{1000 * second:.1f}" for second in seconds)])
    return rows


def captions(runs: list[Run], ranks: int, epochs: int) -> tuple[str, str]:
    """What the figures of the two tables mean."""
    layers = next((run.last["compressed_layers_ratio"] for run in runs if run.last["compressed_layers_ratio"]), None)
    measured = (
        f"Ranks: {ranks}, on one machine; epochs: {epochs}; the same seed. Bytes sent: what one rank sends per step, "
        "headers included; for an allreduce (a ring) 2(n−1)/n times its payload, for an allgather n−1 times its "
        "container; with 2 ranks both are the payload. Ratio: against Horovod float32. "
        + (f"The compressed layers alone: {layers:.0f}×. " if layers else "")
        + "Codec: selecting, encoding, decoding. Exchange: the time that a step waits for the others and for Horovod; "
        "what Horovod does in the background of the backward pass, and its conversion to fp16, count as compute."
    )
    projected = (
        "Projected, not measured: compute time (the least of the runs, for all of them) plus codec time plus "
        "bytes sent / bandwidth; without latency, and with nothing hidden behind the backward pass."
    )
    return measured, projected


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


def document(runs: list[Run], captions: tuple[str, str], made: str) -> str:
    """made: on what and by which command."""
    return (
        "\n\n".join(
            [
                as_markdown(measured_table(runs)),
                captions[0],
                as_markdown(projected_table(runs)),
                captions[1],
                f"Measured on {datetime.date.today().isoformat()} on {made}.",
            ]
        )
        + "\n"
    )


def around_markers(path: str, markers: tuple[str, str] = MARKERS) -> tuple[str, str]:
    """What stands before and after the text between a file's markers, markers included. Raises ValueError, OSError."""
    with open(path, encoding="utf-8") as file:
        before, begin, rest = file.read().partition(markers[0])
    _, end, after = rest.partition(markers[1])
    if not (begin and end):
        raise ValueError(f"{path} lacks the markers {markers[0]} and {markers[1]}")
    return before + begin, end + after


def plot(runs: list[Run], folder: str) -> list[str]:
    """Accuracy against epochs and against bytes sent; returns the files."""
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


def make_parser(description: str, epochs: int, markers: tuple[str, str]) -> argparse.ArgumentParser:
    """What the comparisons on Fashion-MNIST take."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--data", required=True, help="folder of the data set (see mpirun/fetch_fashion_mnist.py)")
    parser.add_argument("--out", required=True, help="folder for the table, the plots and the logs")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=epochs)
    parser.add_argument("--spec", default=DEFAULT_SPEC, help="what grace_ext compresses with (default: %(default)s)")
    parser.add_argument("--memory", default="residual")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--train-samples", type=int, default=60000)
    parser.add_argument("--timeout", type=float, default=900, help="seconds after which a run is stopped")
    parser.add_argument("--readme", help=f"a file in which the text between {markers[0]} and {markers[1]} is replaced")
    return parser


def parse_args(parser: argparse.ArgumentParser, markers: tuple[str, str]):
    """The arguments, checked; `changed` has what decides on the figures and is not the default."""
    args = parser.parse_args()
    try:
        grace_ext.compressor(args.spec)
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


def train_all(methods: dict[str, tuple[str, str]], args, example: str = EXAMPLE, env=None, launcher=None) -> list[Run]:
    """methods: by label, the name of the log file and the example's --compression. Raises RunFailed."""
    os.makedirs(args.out, exist_ok=True)
    runs = []
    for number, (label, (name, compression)) in enumerate(methods.items(), 1):
        print(f"\n[{number}/{len(methods)}] {label}", file=sys.stderr, flush=True)
        options = [
            "--data",
            os.path.abspath(args.data),
            "--compression",
            compression,
            "--memory",
            args.memory,
            "--epochs",
            str(args.epochs),
            "--seed",
            str(args.seed),
            "--train-samples",
            str(args.train_samples),
        ]
        log_file = os.path.join(args.out, f"{name}.jsonl")
        runs.append(train(label, options, log_file, args.ranks, args.timeout, example, env, launcher))
    return runs


def command_of(script: str, args, usual: str) -> str:
    """The command that gives the same figures: `usual`, or the script with what was changed."""
    changed = "".join(
        f" --{name.replace('_', '-')}" + ("" if value is True else f" {value}") for name, value in args.changed.items()
    )
    return f"python examples/{script} --data DIR --out DIR{changed}" if changed else usual


def publish(runs: list[Run], args, captions: tuple[str, str], made: str, markers: tuple[str, str]) -> None:
    """Write the tables and plots, into the README too if that is wanted, and print the tables."""
    text = document(runs, captions, made)
    files = [os.path.join(args.out, "comparison.md"), *plot(runs, args.out)]
    with open(files[0], "w", encoding="utf-8") as file:
        file.write(text)
    if args.readme:
        before, after = around_markers(args.readme, markers)
        with open(args.readme, "w", encoding="utf-8") as file:
            file.write(f"{before}\n{text}{after}")
    for rows, caption in zip((measured_table(runs), projected_table(runs)), captions, strict=True):
        print(f"\n{as_text(rows)}\n\n{caption}")
    print(f"\nwritten: {', '.join(files)}")


def main():
    args = parse_args(make_parser(__doc__.splitlines()[0], 3, MARKERS), MARKERS)
    started = time.perf_counter()
    runs = train_all(
        {
            "Horovod float32": ("float32", "none"),
            "Horovod fp16": ("fp16", "fp16"),
            f"grace_ext {args.spec}": ("grace_ext", args.spec),
        },
        args,
    )
    made = f"{machine()}, by `{command_of('compare_fashion_mnist.py', args, 'make demo')}`"
    publish(runs, args, captions(runs, args.ranks, args.epochs), made, MARKERS)
    print(f"all in {(time.perf_counter() - started) / 60:.1f} minutes")


if __name__ == "__main__":
    try:
        main()
    except RunFailed as error:
        sys.exit(f"[demo] error: {error}")
    except KeyboardInterrupt:
        sys.exit(130)
