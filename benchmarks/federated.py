"""Federated training over MPI, compressed in both directions, against float32; writes docs/federated.md.

    python benchmarks/federated.py --data DIR

    python benchmarks/federated.py --liars

It measures DeepReduce's methods (its Table 5) and ours under FedAvg, and Panthalia's DCT under central AdamW. It can run in
parts and be resumed: --methods fedavg best --resume. Measurements are kept in benchmarks/results/federated, and the section
is written from all of them. --liars writes another section, in less than a minute and without the data set: how well means
do when some clients are Byzantine. Ends with status 1 if a bar is missed.
"""

import argparse
import dataclasses
import datetime
import json
import os
import shutil
import statistics
import sys
import time

import _liars
from _lib import ROOT, SHARED_CORES, RunFailed, as_markdown, finish, machine
from _page import by_seed, path_of, write_section

EXAMPLE = os.path.join(ROOT, "examples", "fedavg_fashion_mnist.py")
LAST = 5  # evaluations whose mean is a run's accuracy
FEDAVG, PANTHALIA = "fedavg", "panthalia"


@dataclasses.dataclass
class Method:
    """A row of the table.

    paper: relative data volume in DeepReduce's Table 5. is_judged: whether the bar of its training applies to it. beta1: of AdamW
    on the server.
    """

    training: str
    label: str
    spec: str
    memory: str = "residual"
    paper: float | None = None
    is_judged: bool = False
    beta1: float = 0.9


#: name of the result -> method. The others are compared with those of FEDAVG and PANTHALIA.
METHODS = {
    FEDAVG: Method(FEDAVG, "FedAvg, float32", "dense/raw", paper=1.0),
    "topr": Method(FEDAVG, "Top-r", "topk:0.1/raw/raw", paper=0.2069),
    "dr-bf-p0": Method(FEDAVG, "DR, BF-P0", "dr-bf-p0:0.1", paper=0.1475),
    "dr-fit-poly": Method(FEDAVG, "DR, Fit-Poly", "dr-fit-poly:0.1", paper=0.1087),
    "dr-bf-p0-qsgd": Method(FEDAVG, "DR, BF-P0 and QSGD", "dr-bf-p0-qsgd:0.1", paper=0.0713),
    "dr-bf-p2-qsgd": Method(FEDAVG, "DR, BF-P2 and QSGD", "dr-bf-p2-qsgd:0.1"),
    "best": Method(FEDAVG, "ours", "topk:0.1/rice/lloyd:0.05", is_judged=True),
    PANTHALIA: Method(PANTHALIA, "AdamW, float32", "dense/raw"),
    "dct-momentum": Method(PANTHALIA, "Panthalia, 1 %", "panthalia", is_judged=True),
    "dct": Method(PANTHALIA, "Panthalia, 1 %, no momentum on the server", "panthalia", is_judged=True, beta1=0.0),
    "dct-dense": Method(
        PANTHALIA,
        "Panthalia, 4.5 %, no momentum on the server",
        "dct:64/topk:0.045:per=chunk/auto/minmax:8:per=chunk:entropy=ans",
        is_judged=True,
        beta1=0.0,
    ),
}
#: By training: for what, the largest volume each way, and the most points of accuracy that may be lost. A bar is met if one
#: of the methods that are judged meets it.
BARS = {FEDAVG: ("FedAvg with the top 10 %", 0.035, 0.5), PANTHALIA: ("Panthalia's scheme", 1 / 50, 1.0)}


class Results:
    """The runs in a folder, by method and seed.

    Only those count that differ from their baseline in nothing but compression, memory and AdamW's beta1.
    """

    def __init__(self, folder: str):
        self._runs = {name: {} for name in METHODS}
        for name, method in METHODS.items():
            for seed, run in by_seed(folder, name).items():
                if name == method.training or self.is_comparable(run, self._runs[method.training].get(seed)):
                    self._runs[name][seed] = run

    @staticmethod
    def is_comparable(run: dict, baseline: dict | None) -> bool:
        return baseline is not None and all(
            baseline["options"].get(key) == value
            for key, value in run["options"].items()
            if key not in ("compression", "memory", "beta1")
        )

    def names(self, training: str) -> list[str]:
        return [name for name, method in METHODS.items() if method.training == training and self._runs[name]]

    def runs(self, name: str) -> list[dict]:
        return list(self._runs[name].values())

    def dates(self) -> list[str]:
        return sorted({run["date"] for runs in self._runs.values() for run in runs.values()})

    def accuracy(self, name: str) -> float:
        """Return the accuracy in percent: the mean of the last evaluations, which vary more than methods differ."""
        return statistics.mean(map(accuracy, self.runs(name)))

    def gained(self, name: str) -> float:
        """Return the points gained over the baseline of the same seeds."""
        baseline = self._runs[METHODS[name].training]
        return statistics.mean(accuracy(run) - accuracy(baseline[seed]) for seed, run in self._runs[name].items())

    def mean(self, name: str, group: str, key: str) -> float:
        return statistics.mean(run[group][key] for run in self.runs(name))

    def volume(self, name: str, way: str) -> float:
        return self.mean(name, "volume", way)

    def verdicts(self) -> dict[str, dict[str, bool]]:
        """Return, for each training that was measured, whether the methods that are judged meet its bar."""
        found = {}
        for training, (_, volume, points) in BARS.items():
            judged = [name for name in self.names(training) if METHODS[name].is_judged]
            if judged:
                found[training] = {
                    name: max(self.volume(name, "down"), self.volume(name, "up")) <= volume and self.gained(name) >= -points
                    for name in judged
                }
        return found


def accuracy(run: dict) -> float:
    """In percent: the mean of the last evaluations, which differ from each other by more than methods do."""
    return 100 * statistics.mean(value for _, value in run["accuracy"][-LAST:])


def table(results: Results, training: str) -> list[list[str]]:
    names = results.names(training)
    has_paper = any(METHODS[name].paper for name in names)
    rows = [
        [
            "",
            "spec, memory",
            "volume down",
            "volume up",
            *(["volume in DeepReduce, Table 5"] if has_paper else []),
            "fewer bytes",
            "seeds",
            "accuracy",
            "points",
            "client decodes, ms",
            "client encodes, ms",
            "server decodes, ms",
            "server encodes, ms",
        ]
    ]
    for name in names:
        method, volumes = METHODS[name], [results.volume(name, way) for way in ("down", "up")]
        times = [
            1000 * results.mean(name, "cpu_seconds", f"{who}_{what}")
            for who in ("client", "server")
            for what in ("decode", "encode")
        ]
        rows.append(
            [
                method.label,
                f"`{method.spec}`, {method.memory}",
                *(f"{volume:.4f}" for volume in volumes),
                *([f"{method.paper:.4f}" if method.paper else ""] if has_paper else []),
                f"{1 / max(volumes):.1f}×",
                str(len(results.runs(name))),
                f"{results.accuracy(name):.2f} %",
                "" if name == training else f"{results.gained(name):+.2f}",
                *(f"{time:.1f}" for time in times),
            ]
        )
    return rows


def bars(results: Results) -> str:
    lines = []
    for training, verdicts in results.verdicts().items():
        what, volume, points = BARS[training]
        each = (
            f"{'met' if is_met else '**missed**'} by {METHODS[name].label} ({results.volume(name, 'down'):.4f} down, "
            f"{results.volume(name, 'up'):.4f} up, {results.gained(name):+.2f} points)"
            for name, is_met in verdicts.items()
        )
        lines.append(
            f"- The target for {what}, set before measuring (at most {volume:g} of the bytes each way and at most {points:g} points "
            f"of accuracy lost), is {', '.join(each)}."
        )
    return "\n".join(lines)


def described(run: dict, what: str) -> str:
    """Describe a baseline's options."""
    options = run["options"]
    local = {
        FEDAVG: f"{options['local_epochs']} local epoch, Adam on the clients",
        PANTHALIA: f"{options['local_batches']} batch per gradient, AdamW on the server, whose learning rate falls to 0 "
        "as a cosine",
    }[what]
    taken = "all in every round" if options["sampled"] is None else f"{options['sampled']} of them in each round"
    return (
        f"{options['rounds']} rounds, {options['clients']} clients, {taken}, {local}, batches of "
        f"{options['batch']}, learning rate {options['lr']:g}; a model of {run['parameters'] / 1e6:.2f} million "
        f"parameters (`{options['model']}`), {options['train_samples'] or 60000} images split by LDA with alpha "
        f"{options['alpha']:g}"
    )


def document(results: Results, command: str) -> str:
    """Write the section, with only those trainings whose baseline was measured."""
    parts = [
        "Written by `benchmarks/federated.py`; do not edit between the markers. `examples/fedavg_fashion_mnist.py`, "
        "compression and memory as the table says, all else alike."
    ]
    for training, title in ((FEDAVG, "FedAvg on Fashion-MNIST"), (PANTHALIA, "Panthalia on Fashion-MNIST")):
        if results.names(training):
            parts += [f"{title}: {described(results.runs(training)[0], training)}.", as_markdown(table(results, training))]
    parts.append(
        "- Volume: bytes of messages, headers included, by those of the same messages as float32; down without the first "
        "round, in which there is nothing to tell. Volume in DeepReduce, Table 5: MobileNet on CIFAR-10.\n"
        f"- Accuracy: of the server's model on the test set, the mean of the last {LAST} evaluations. Points: against the float32 "
        "of the same table and seeds. Further seeds were measured with `--methods NAME ... --seeds 1 2`.\n"
        "- Milliseconds of CPU time, on average: a client decodes a message and encodes an update, its memory included; the "
        "server encodes one container a round, and decodes all updates of a round and takes its step.\n"
        "- Panthalia's learning rate, and the larger density, were chosen by shorter runs with seed 0; without compression, this "
        "rate is better than half of it, too. The server's momentum is AdamW's `beta1`, 0.9 where nothing is said.\n"
        + bars(results)
    )
    parts.append("![Accuracy by round](federated.png)")
    parts.append(f"Measured on {' and '.join(results.dates())} on {machine()}, all ranks on the same cores, by `{command}`.")
    return "\n\n".join(parts) + "\n"


def plot(results: Results, path: str) -> None:
    """Plot the accuracy by round, of the first seed."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(11, 4.5), layout="constrained")
    for ax, training in zip(axes, (FEDAVG, PANTHALIA), strict=True):
        curves = [[100 * value for _, value in results.runs(name)[0]["accuracy"]] for name in results.names(training)]
        for name, curve in zip(results.names(training), curves, strict=True):
            rounds = [number for number, _ in results.runs(name)[0]["accuracy"]]
            ax.plot(rounds, curve, "--" if name == training else "-", label=METHODS[name].label, linewidth=1.2)
        if curves:
            best = max(map(max, curves))
            ax.set(xlabel="round", ylabel="test accuracy (%)", ylim=(best - 12, best + 0.5))
            ax.legend(loc="lower right", fontsize="small")
        ax.grid(True, alpha=0.3)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def measure(name: str, seed: int, args) -> None:
    """Run one training, unless there is a result."""
    method, out = METHODS[name], path_of(args.raw, name, seed)
    options = {"method": method.training, "compression": method.spec, "memory": method.memory, "seed": seed}
    if method.training == FEDAVG:
        options |= {"rounds": args.rounds, "evaluate_every": 1}
    else:
        rounds = args.panthalia_rounds
        options |= {"rounds": rounds, "evaluate_every": max(1, rounds // 50), "lr": 0.004, "lr_rounds": rounds}
        options["beta1"] = method.beta1
    if args.resume and os.path.exists(out):
        with open(out, encoding="utf-8") as file:
            before = json.load(file)["options"]
        if all(before.get(key) == value for key, value in options.items()):
            say(f"{name}, seed {seed}: was measured before")
            return
    say(f"{name}, seed {seed}: {method.spec}")
    given = [part for key, value in options.items() for part in (f"--{key.replace('_', '-')}", str(value))]
    mpirun = shutil.which("mpirun", path=os.path.dirname(sys.executable)) or "mpirun"
    command = [
        mpirun,
        "--oversubscribe",
        "-n",
        str(args.clients + 1),
        sys.executable,
        EXAMPLE,
        "--data",
        os.path.abspath(args.data),
        "--out",
        out,
        *given,
    ]
    finish(f"{name}, seed {seed}", command, args.timeout, SHARED_CORES)
    with open(out, encoding="utf-8") as file:
        run = json.load(file)
    with open(out, "w", encoding="utf-8") as file:
        json.dump({**run, "date": datetime.date.today().isoformat()}, file)


def write_liars(folder: str) -> int:
    """Measure with Byzantine clients, write that section, and return the exit status."""
    text, is_met = _liars.measure()
    date = datetime.date.today().isoformat()
    path = write_section(
        folder,
        "liars",
        "Clients that lie",
        f"{text}\nMeasured on {date} on {machine()}, by `python benchmarks/federated.py --liars`.\n",
        "federated.md",
    )
    say(f"written: {path}")
    return 0 if is_met else 1


def say(text: str) -> None:
    print(f"[federated] {text}", flush=True)


DEFAULTS = {"clients": 10, "rounds": 40, "panthalia_rounds": 1200}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", help="folder of the data set (see mpirun/fetch_fashion_mnist.py); needed without --liars")
    parser.add_argument("--liars", action="store_true", help="only write the section about Byzantine clients")
    parser.add_argument("--out", default=os.path.join(ROOT, "docs"), help="folder of federated.md and the plot")
    parser.add_argument(
        "--raw", default=os.path.join(ROOT, "benchmarks", "results", "federated"), help="folder of measurements"
    )
    parser.add_argument("--resume", action="store_true", help="skip what was measured before with the same options")
    parser.add_argument("--methods", nargs="*", choices=METHODS, default=list(METHODS), help="none: only write the section")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    for option, value in DEFAULTS.items():
        parser.add_argument(f"--{option.replace('_', '-')}", type=int, default=value, help="default: %(default)s")
    parser.add_argument("--timeout", type=float, default=3600, help="seconds after which a run is stopped")
    args = parser.parse_args()
    if args.liars:
        return write_liars(args.out)
    if args.data is None:
        parser.error("--data is needed without --liars")
    args.raw = os.path.abspath(args.raw)
    os.makedirs(args.raw, exist_ok=True)
    started = time.monotonic()
    for seed in args.seeds:
        for name in args.methods:
            measure(name, seed, args)
    results = Results(args.raw)
    plot(results, os.path.join(args.out, "federated.png"))
    command = "python benchmarks/federated.py --data DIR" + "".join(
        f" --{option.replace('_', '-')} {getattr(args, option)}"
        for option, value in DEFAULTS.items()
        if getattr(args, option) != value
    )
    path = write_section(args.out, "federated", "Measurements", document(results, command), "federated.md")
    say(f"written: {path}; all in {(time.monotonic() - started) / 60:.1f} minutes")
    return 0 if all(any(verdicts.values()) for verdicts in results.verdicts().values()) else 1


if __name__ == "__main__":
    try:
        sys.exit(main())
    except RunFailed as error:
        sys.exit(f"[federated] error: {error}")
