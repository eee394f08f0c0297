"""Do communicators that compress sums on the way cost accuracy? Three seeds, against allgather.

    python benchmarks/communicators.py --data DIR

Writes the section "Convergence of communicators" of docs/benchmarks.md. Ends with status 1 if one misses the bar. About 15
minutes on two idle cores.
"""

import datetime
import os
import statistics
import sys
import time

from _lib import ROOT, RunFailed, as_markdown, machine, make_training_parser, train, training_options
from _page import write_section
from accuracy import MOST_POINTS_LOST, differences, score_rows

from grace_ext.policy import DEFAULT_SPEC

BASELINE = "allgather"


def document(results: dict, args, met: bool) -> str:
    """Write the section. results: communicator -> list of runs, one per seed; allgather first."""
    return (
        "\n\n".join(
            [
                "Written by `benchmarks/communicators.py`; do not edit. Test accuracy on Fashion-MNIST after "
                f"{args.epochs} epochs with {args.ranks} ranks, `{DEFAULT_SPEC}` and memory residual "
                "(`examples/pytorch_fashion_mnist.py`). `sharded` and `tree` also compress the sums that they pass on, "
                "with separate error feedback. Differences are relative to `allgather`; the factor beside their mean is "
                "the reduction of bytes against float32, biases included.",
                as_markdown(score_rows(results, args.seeds)),
                f"- The target, set before measuring: the mean is at most {MOST_POINTS_LOST} points below that of `allgather`. It is "
                f"{'met' if met else '**missed**'}.",
                f"Measured on {datetime.date.today().isoformat()} on {machine()}, by "
                "`python benchmarks/communicators.py --data DIR`.",
            ]
        )
        + "\n"
    )


def main():
    parser = make_training_parser(__doc__.splitlines()[0], 3, 4)
    parser.add_argument("--out", default=os.path.join(ROOT, "docs"), help="folder of benchmarks.md")
    parser.add_argument("--logs", default=os.path.join(ROOT, "build", "communicators"), help="folder for the runs' logs")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--communicators", nargs="+", default=["sharded", "tree"])
    args = parser.parse_args()
    os.makedirs(args.logs, exist_ok=True)
    started = time.perf_counter()
    results = {communicator: [] for communicator in (BASELINE, *args.communicators)}
    for seed in args.seeds:
        for communicator, runs in results.items():
            label = f"{communicator}, seed {seed}"
            print(f"\n{label}", file=sys.stderr, flush=True)
            options = training_options(args, seed, communicator=communicator)
            log_file = os.path.join(args.logs, f"{communicator}-{seed}.jsonl")
            runs.append(train(label, options, log_file, args.ranks, timeout=1800))
    baseline, *others = results.values()
    met = all(statistics.mean(differences(baseline, runs)) >= -MOST_POINTS_LOST for runs in others)
    text = document(results, args, met)
    path = write_section(args.out, "communicators", "Convergence of communicators", text)
    print(f"\n{text}\nwritten: {path}; all in {(time.perf_counter() - started) / 60:.1f} minutes")
    return 0 if met else 1


if __name__ == "__main__":
    try:
        sys.exit(main())
    except RunFailed as error:
        sys.exit(f"[communicators] error: {error}")
