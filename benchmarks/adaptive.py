"""Kimad, Kimad+ and a fixed density on four hosts whose links change during training; writes docs/benchmarks.md.

    python benchmarks/adaptive.py --data DIR

Needs root, for hosts on this machine (mpirun/hosts). About 6 minutes.
"""

import argparse
import dataclasses
import datetime
import json
import os
import shutil
import signal
import statistics
import sys
import time

import numpy as np
from _hosts import LAUNCHERS, Hosts, Job, JobFailed, wait_until
from _lib import ROOT, as_markdown, machine, size
from _page import write_section

from grace_ext.policy.allocation import ErrorCurve, least_error
from grace_ext.policy.kimad import CURVES, predict_sizes

WORKER = os.path.join(ROOT, "benchmarks", "_adaptive_worker.py")
HOSTS = 4
FIRST = 15  # steps before the rates begin to change
NEAR = 0.25  # relative deviation from the step time that is aimed at
SETTLED = 0.25  # share of a phase after which steps are judged
PARAMETERS, LAYERS = 25_000_000, 60  # size of the gradient on which the time to decide is measured
SPEC = "topk:{density}/rice/qsgd:7"


@dataclasses.dataclass
class Phase:
    """Steps of rank 0: when each ended since the beginning, seconds of each step, bytes handed to collectives."""

    rate: str
    times: list[float]
    steps: list[float]
    sent: list[float]

    @property
    def settled(self) -> list[int]:
        begin, end = self.times[0], self.times[-1]
        return [number for number, at in enumerate(self.times) if at >= begin + SETTLED * (end - begin)]

    def median(self) -> float:
        return statistics.median(self.steps[number] for number in self.settled)

    def bytes(self) -> float:
        return statistics.median(self.sent[number] for number in self.settled)

    def share(self, seconds: float) -> float:
        """Return the share of steps that took that long, within NEAR."""
        return statistics.mean(abs(self.steps[number] - seconds) <= NEAR * seconds for number in self.settled)


def configurations(args) -> dict[str, dict]:
    """Return label -> keyword arguments of DistributedOptimizer."""
    spec = SPEC.format(density=args.density)
    return {
        f"fixed, {100 * args.density:g}%": {"compression": spec},
        **{
            label: {"compression": spec, "schedule": {"density": f"{name}:{args.time}"}}
            for label, name in (("Kimad", "kimad"), ("Kimad+", "kimad+"))
        },
    }


def run(up: Hosts, arguments: dict, args, folder: str) -> list[Phase]:
    """Run one configuration through all rates. Raises JobFailed."""
    shutil.rmtree(folder, ignore_errors=True)
    os.makedirs(folder)
    up("rate", args.rates[0])
    options = {"data": args.data, "out": folder, "arguments": arguments}
    job = Job(up, args.launcher, args.hosts, [WORKER, json.dumps(options)])
    try:
        if not wait_until(lambda: job.processes[0].poll() is not None or len(read(folder)) >= FIRST, 300):
            raise JobFailed(f"it does not train:\n{job.stop()[-4000:]}")
        began = [time.time()]
        for rate in args.rates:
            up("rate", rate)
            began[-1] = time.time()
            wait_until(lambda: job.processes[0].poll() is not None, args.seconds)
            began.append(time.time())
        if job.processes[0].poll() is not None:
            raise JobFailed(f"it ended:\n{job.stop()[-4000:]}")
    finally:
        job.stop()
    return phases(read(folder), args.rates, began)


def read(folder: str) -> list[list[float]]:
    """Read [when a step of rank 0 ended, how long it took, bytes so far] of each step."""
    try:
        with open(os.path.join(folder, "rank0.steps")) as file:
            return [[float(number) for number in line.split()] for line in file if line.endswith("\n")]
    except OSError:
        return []


def phases(lines: list[list[float]], rates: list[str], began: list[float]) -> list[Phase]:
    """Divide the steps into phases. began: when each phase began, and when the last one ended."""
    found = []
    sent = [after[2] - before[2] for before, after in zip(lines, lines[1:], strict=False)]
    for rate, start, end in zip(rates, began[:-1], began[1:], strict=True):
        inside = [(line, nbytes) for line, nbytes in zip(lines[1:], sent, strict=True) if start <= line[0] - line[1] < end]
        found.append(
            Phase(
                rate,
                [line[0] - began[0] for line, _ in inside],
                [line[1] for line, _ in inside],
                [nbytes for _, nbytes in inside],
            )
        )
    return found


def decision() -> tuple[float, float]:
    """Measure the mean seconds that Kimad+ takes to decide, and those of one memcpy of the gradient, in turns."""
    random = np.random.default_rng(0)
    share = random.dirichlet(np.ones(LAYERS))
    layers = [random.standard_t(3, max(1, int(PARAMETERS * one))).astype(np.float32) for one in share]
    copies = [np.empty_like(one) for one in layers]
    sizes = [predict_sizes(0.02 * one.size, 0.01, one.size) for one in layers]
    decided, copied = [], []
    for _ in range(9):
        started = time.perf_counter()
        for one, copy in zip(layers, copies, strict=True):
            np.copyto(copy, one)
        copied.append(time.perf_counter() - started)
        started = time.perf_counter()
        curves = [ErrorCurve(one, copy) for one, copy in zip(layers, copies, strict=True)]
        looked = time.perf_counter() - started
        started = time.perf_counter()
        least_error(curves, sizes, 0.05 * PARAMETERS)
        decided.append(looked / CURVES + time.perf_counter() - started)
    return statistics.median(decided[2:]), statistics.median(copied[2:])


def document(found: dict[str, list[Phase]], cost: tuple[float, float], args) -> str:
    rows = [["", *args.rates, f"within {NEAR:.0%} of {1000 * args.time:.0f} ms"]]
    for label, run_of in found.items():
        cells = [
            f"{1000 * phase.median():.0f} ms, {phase.share(args.time):.0%} of steps on time, {size(phase.bytes())}"
            for phase in run_of
        ]
        near = all(abs(phase.median() - args.time) <= NEAR * args.time for phase in run_of)
        rows.append([label, *cells, "met" if near else "**missed**"])
    return (
        "\n\n".join(
            [
                f"{args.hosts} hosts (`mpirun/hosts`) train the MLP of 5.8 M parameters while the rate of all links "
                f"changes every {args.seconds:g} s. Kimad aims at {1000 * args.time:.0f} ms per step. The table leaves out "
                f"the first {SETTLED:.0%} of each phase. It shows the median step of rank 0, the share of steps that are "
                f"on time (within {NEAR:.0%} of the time aimed at), and the bytes that a rank passes to its collective.",
                as_markdown(rows),
                "![steps over time](adaptive.png)",
                f"Kimad+ takes {1000 * cost[0]:.1f} ms per step to decide for {PARAMETERS / 1e6:g} M parameters in "
                f"{LAYERS} layers on one core, where a memcpy of the gradient takes {1000 * cost[1]:.1f} ms: "
                f"{cost[0] / cost[1]:.2f} memcpy. The target, set before measuring, is at most 1: "
                f"{'met' if cost[0] <= cost[1] else '**missed**'}. "
                f"It examines the gradients in every {CURVES}th step, in the thread that compresses them.",
                f"Measured on {datetime.date.today().isoformat()} on {machine()}, by "
                f"`python benchmarks/adaptive.py --data DIR`.",
            ]
        )
        + "\n"
    )


def plot(found: dict[str, list[Phase]], args, path: str) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axis = plt.subplots(figsize=(11, 4), layout="constrained")
    for label, run_of in found.items():
        axis.plot(
            [at for phase in run_of for at in phase.times],
            [1000 * one for phase in run_of for one in phase.steps],
            label=label,
            alpha=0.8,
        )
    axis.axhspan(1000 * (1 - NEAR) * args.time, 1000 * (1 + NEAR) * args.time, color="grey", alpha=0.2)
    for number, rate in enumerate(args.rates):
        axis.axvline(number * args.seconds, color="grey", linestyle=":")
        axis.annotate(rate, (number * args.seconds, 1), xycoords=("data", "axes fraction"), va="top")
    axis.set(xlabel="seconds", ylabel="ms a step", yscale="log")
    axis.legend(loc="lower right")
    figure.savefig(path, dpi=100)
    plt.close(figure)


def parse_args():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", required=True, help="folder of the data set (see mpirun/fetch_fashion_mnist.py)")
    parser.add_argument("--out", default=os.path.join(ROOT, "docs"), help="folder of benchmarks.md and the plot")
    parser.add_argument(
        "--raw", default=os.path.join(ROOT, "build", "benchmarks", "adaptive"), help="folder for the ranks' files"
    )
    parser.add_argument("--hosts", type=int, default=HOSTS)
    parser.add_argument("--rates", nargs="+", default=["100mbit", "20mbit", "300mbit", "50mbit"])
    parser.add_argument("--seconds", type=float, default=20, help="seconds of each rate (default: %(default)s)")
    parser.add_argument("--time", type=float, default=0.25, help="step time to aim at, in seconds (default: %(default)s)")
    parser.add_argument("--density", type=float, default=0.05, help="the fixed density (default: %(default)s)")
    parser.add_argument("--launcher", choices=LAUNCHERS, default="horovodrun --gloo")
    parser.add_argument("--name", default="bench-adaptive", help="name of the set of hosts (mpirun/hosts --name)")
    args = parser.parse_args()
    args.data, args.raw = os.path.abspath(args.data), os.path.abspath(args.raw)
    return args


def main() -> int:
    args = parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that the hosts are removed
    found, cost = {}, decision()
    with Hosts(args.name, args.hosts, args.rates[0]) as up:
        for label, arguments in configurations(args).items():
            for attempt in (1, 2):  # mpirun occasionally hangs (docs/cluster.md)
                try:
                    found[label] = run(up, arguments, args, args.raw)
                    break
                except JobFailed as error:
                    print(f"[adaptive] {label}, attempt {attempt}: {error}", flush=True)
            else:
                return 1
            print(
                f"[adaptive] {label}: "
                + ", ".join(f"{phase.rate} {1000 * phase.median():.0f} ms" for phase in found[label]),
                flush=True,
            )
    os.makedirs(args.out, exist_ok=True)
    plot(found, args, os.path.join(args.out, "adaptive.png"))
    write_section(args.out, "adaptive", "Adaptive compression on hosts", document(found, cost, args))
    return 0


if __name__ == "__main__":
    sys.exit(main())
