"""Kimad and Kimad+ against EF21 with a fixed density, in virtual time over the link of Figure 7 of the paper.

    python benchmarks/kimad.py --data DIR

Writes the section "Adaptive compression, simulated" of docs/benchmarks.md and docs/kimad.png. Takes about 20 minutes on one
core.
"""

import argparse
import datetime
import os
import sys
import time

import numpy as np
from _lib import ROOT, as_markdown, machine
from _page import write_section

from grace_ext.simulate import FashionMnist
from grace_ext.simulate.command import POLICIES, add_arguments, compare, setting_of
from grace_ext.simulate.plot import draw

LINK = "sinusoid:30mbit:330mbit:300ms"
SETTING = ["--task", "cnn", "--time", "8ms", "--compute", "4ms", "--up", LINK, "--noise", "0.1", "--decay"]
FASTER, POINTS, ERROR = 0.8, 0.5, 0.85  # bars: seconds by EF21's; points of accuracy from EF21; error by Kimad's
OWN, ONE = "links of different workers with different phases", "all links in phase"
IN_ONE = (4,)  # workers


def document(found: dict, args) -> str:
    parts = [
        "The network of `grace_ext.simulate.FashionMnist` (409,146 parameters) trains on a parameter server with EF21 in "
        "both directions (Algorithm 3 of Kimad); each layer is compressed separately. The rates of the links oscillate "
        "between 30 and 330 Mbit/s, as in Figure 7 of the paper, scaled to this model: a period of 300 ms, 10% noise on "
        "each link, 4 ms of computation, and steps that aim at 8 ms. EF21 uses a fixed density, chosen so "
        "that it sends as many bytes as Kimad. The bandwidth is what workers measured in their last transfers.",
        "![steps over virtual time](kimad.png)",
        bars(found, args.workers),
    ]
    for phases in (OWN, ONE):
        rows = [["workers", "", "ms a step", "against EF21", "kB up", "kB down", "accuracy", "error against Kimad's"]]
        for workers, runs in ((count, runs) for (one, count), runs in found.items() if one == phases):
            for label, records in runs.items():
                seconds, error = ratio(runs, label, "EF21", "seconds"), ratio(runs, label, "Kimad", "error")
                rows.append(
                    [
                        str(workers),
                        label,
                        f"{1000 * mean(records, 'seconds'):.2f}",
                        f"{seconds:.3f}",
                        f"{mean(records, 'up') / 1000:.1f}",
                        f"{mean(records, 'down') / 1000:.1f}",
                        f"{accuracy(records):.2%}",
                        f"{error:.3f}",
                    ]
                )
        parts += [f"{phases[0].upper()}{phases[1:]}:", as_markdown(rows)]
    parts.append("""\
- Adapting saves time in two ways. A fixed message spends more time in the slow part of the period, which costs about a tenth
  here, whatever the noise. The rest is waiting for the slowest worker, which occurs only if links are slow at different times.
- Times are virtual, so they are the same on every machine. Accuracy can differ by float32 rounding.""")
    parts.append(
        f"{args.steps} steps of 32 images per worker, computed on {datetime.date.today().isoformat()} on {machine()}, by "
        "`python benchmarks/kimad.py --data DIR`. To run one of them separately: `python -m grace_ext simulate --data DIR "
        f"--workers 4 --steps {args.steps} {' '.join(SETTING)} --phases`."
    )
    return "\n\n".join(parts) + "\n"


def bars(found: dict, numbers) -> str:
    rows = [[OWN, "at most", *(f"{workers} workers" for workers in numbers)]]
    for what, most, value in (
        ("seconds per step, Kimad / EF21", FASTER, lambda runs: ratio(runs, "Kimad", "EF21", "seconds")),
        (
            "points of accuracy between Kimad and EF21",
            POINTS,
            lambda runs: 100 * abs(accuracy(runs["Kimad"]) - accuracy(runs["EF21"])),
        ),
        ("squared error, Kimad+ / Kimad", ERROR, lambda runs: ratio(runs, "Kimad+", "Kimad", "error")),
    ):
        measured = [value(found[OWN, workers]) for workers in numbers]
        rows.append([what, f"{most}", *(f"{one:.3f}, {'met' if one <= most else '**missed**'}" for one in measured)])
    return as_markdown(rows)


def ratio(runs: dict, label: str, other: str, name: str) -> float:
    return mean(runs[label], name) / mean(runs[other], name)


def mean(records, name: str) -> float:
    return float(np.mean([getattr(record, name) for record in records]))


def accuracy(records) -> float:
    """Return the accuracy after the last step."""
    return records[-1].accuracy


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", required=True, help="folder of the data set (see mpirun/fetch_fashion_mnist.py)")
    parser.add_argument("--out", default=os.path.join(ROOT, "docs"), help="folder of benchmarks.md and the plot")
    parser.add_argument("--workers", nargs="+", type=int, default=[2, 4, 8, 16])
    parser.add_argument("--steps", type=int, default=400)
    args = parser.parse_args()
    simulation = argparse.ArgumentParser()
    add_arguments(simulation)
    os.makedirs(args.out, exist_ok=True)
    task, found, started = FashionMnist(args.data), {}, time.monotonic()
    for phases, workers in (*((OWN, count) for count in args.workers), *((ONE, count) for count in IN_ONE)):
        more = ["--phases"] if phases == OWN else []
        options = simulation.parse_args([*SETTING, *more, "--steps", str(args.steps)])
        found[phases, workers] = compare(task, setting_of(workers, options), POLICIES, options.time)
        print(
            f"[kimad] {phases}, {workers} workers: "
            + ", ".join(
                f"{label} {1000 * mean(records, 'seconds'):.2f} ms, {accuracy(records):.2%}"
                for label, records in found[phases, workers].items()
            )
            + f"; {(time.monotonic() - started) / 60:.1f} minutes",
            flush=True,
        )
    draw(
        {(workers, label): records for workers in args.workers[:2] for label, records in found[OWN, workers].items()},
        os.path.join(args.out, "kimad.png"),
    )
    write_section(args.out, "kimad", "Adaptive compression, simulated", document(found, args))
    return 0


if __name__ == "__main__":
    sys.exit(main())
