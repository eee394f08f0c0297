"""Does compression cost accuracy in Keras 3 and in legacy Keras? Three seeds each; writes docs/accuracy-tensorflow.md.

    python benchmarks/accuracy_tensorflow.py --data DIR

Ends with status 1 if a bar is missed. About 14 minutes on two idle cores.
"""

import datetime
import os
import statistics
import sys
import time

from _lib import (
    FASHION,
    ROOT,
    Run,
    RunFailed,
    as_markdown,
    make_training_parser,
    tensorflow_machine,
    train,
    training_options,
)
from accuracy import MOST_POINTS_LOST, differences, score_rows

from grace_ext.policy import DEFAULT_SPEC

KERAS = {"Keras 3": "0", "legacy Keras": "1"}  # TF_USE_LEGACY_KERAS


def is_met(plain: list[Run], compressed: list[Run]) -> bool:
    return statistics.mean(differences(plain, compressed)) >= -MOST_POINTS_LOST and all(
        len(set(run.last["checksums"])) == 1 for run in (*plain, *compressed)
    )


def document(results: dict[str, dict[str, list[Run]]], args) -> str:
    """Write the page. results: kind of Keras -> label -> runs, one per seed; the float32 runs first."""
    tables = [f"## {kind}\n\n{as_markdown(score_rows(runs, args.seeds))}" for kind, runs in results.items()]
    met = all(is_met(*runs.values()) for runs in results.values())
    options = f" --epochs {args.epochs}" if args.epochs != 3 else ""
    return (
        "\n\n".join(
            [
                "# Accuracy with and without compression: TensorFlow",
                "Written by `benchmarks/accuracy_tensorflow.py`; do not edit. Test accuracy on Fashion-MNIST after "
                f"{args.epochs} epochs over {args.train_samples} images with {args.ranks} ranks and Keras' compile and "
                "fit. All runs have the same script (`examples/tensorflow_keras_fashion_mnist.py`), learning-rate "
                "schedule and seeds; the schedule was not tuned for compression.",
                *tables,
                "- The targets, set before measuring: for both kinds of Keras, the mean accuracy is at most "
                f"{MOST_POINTS_LOST} points below that "
                "of float32, and the weights of all ranks are bit-identical after training in every run. They are "
                f"{'met' if met else '**missed**'}.\n"
                "- float32 is Horovod's allreduce of the same buckets. The memory is `residual`, the communicator "
                "`allgather`.",
                f"Measured on {datetime.date.today().isoformat()} on {tensorflow_machine()}, by "
                f"`python benchmarks/accuracy_tensorflow.py --data DIR{options}`.",
            ]
        )
        + "\n"
    )


def main():
    parser = make_training_parser(__doc__.splitlines()[0], 3)
    parser.add_argument("--out", default=os.path.join(ROOT, "docs", "accuracy-tensorflow.md"))
    parser.add_argument("--logs", default=os.path.join(ROOT, "build", "accuracy-tensorflow"), help="folder for the logs")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--spec", default=DEFAULT_SPEC)
    args = parser.parse_args()
    os.makedirs(args.logs, exist_ok=True)
    started = time.perf_counter()
    labels = {"float32": "none", f"grace_ext {args.spec}": args.spec}
    results = {kind: {label: [] for label in labels} for kind in KERAS}
    for seed in args.seeds:
        for kind, legacy in KERAS.items():
            for label, compression in labels.items():
                title = f"{kind}, {label}, seed {seed}"
                print(f"\n{title}", file=sys.stderr, flush=True)
                options = training_options(args, seed, compression=compression)
                log_file = os.path.join(args.logs, f"{title.replace(' ', '-').replace('/', '-')}.jsonl")
                results[kind][label].append(
                    train(title, options, log_file, args.ranks, 1800, FASHION, {"TF_USE_LEGACY_KERAS": legacy})
                )
    text = document(results, args)
    with open(args.out, "w", encoding="utf-8") as file:
        file.write(text)
    print(f"\n{text}\nwritten: {args.out}; all in {(time.perf_counter() - started) / 60:.1f} minutes")
    return 0 if all(is_met(*runs.values()) for runs in results.values()) else 1


if __name__ == "__main__":
    try:
        sys.exit(main())
    except RunFailed as error:
        sys.exit(f"[accuracy] error: {error}")
