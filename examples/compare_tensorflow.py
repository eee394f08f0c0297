"""Train the two TensorFlow examples with and without compression, from the same seed, and compare.

    python examples/compare_tensorflow.py --data DIR --out DIR

`make demo-tensorflow` calls it. It prints the table and writes it to OUT/comparison.md, with a plot next to it.
"""

import importlib.metadata
import os
import sys
import time

from _comparison import HOROVOD, command_of, machine, make_parser, parse_args, publish, size, training_options
from _launch import HERE, Run, RunFailed, train

from grace_ext.policy import DEFAULT_ROWS_SPEC

FASHION = os.path.join(HERE, "tensorflow_keras_fashion_mnist.py")
TEXT = os.path.join(HERE, "tensorflow_tape_text.py")
MARKERS = "<!-- demo-tensorflow:begin -->", "<!-- demo-tensorflow:end -->"


def tensorflow_machine() -> str:
    """Describe the processor, cores and versions. TensorFlow's package has one of several names."""
    tensorflow = importlib.metadata.packages_distributions()["tensorflow"][0]
    return machine((("TensorFlow", tensorflow), ("Keras", "keras"), HOROVOD))


def result(run: Run) -> str:
    if "accuracy" in run.last:
        return f"{100 * run.last['accuracy']:.2f} % accuracy"
    return f"perplexity {run.last['perplexity']:.1f}"


def table(pairs: list[list[Run]]) -> list[list[str]]:
    """Make the rows of the table. pairs: two runs of each example, the one without compression first."""
    rows = [["", "result", "ms per step", "bytes sent per step", "ratio"]]
    for pair in pairs:
        rows += [
            [
                run.label,
                result(run),
                f"{1000 * run.last['seconds_per_step']:.1f}",
                size(run.bytes_per_step),
                f"{pair[0].bytes_per_step / run.bytes_per_step:.0f}×",
            ]
            for run in pair
        ]
    return rows


def caption(pairs: list[list[Run]], args) -> str:
    of_rows = pairs[1][0].last["horovod_bytes_of_rows"] / pairs[1][0].last["steps"]
    return (
        f"Ranks: {args.ranks}, on one machine; the same seed. Fashion-MNIST: Keras' compile and fit, {args.epochs} "
        f"epoch{'s' * (args.epochs != 1)}, 1.2 million parameters, test accuracy; uncompressed: Horovod's allreduce. Text: "
        f"a loop under tf.function, {args.steps} steps, two tables of 50,000 × 64 whose gradients are tf.IndexedSlices, "
        "perplexity of held-out text. Bytes sent: what one rank sends per step, headers included. Of the text's bytes with "
        f"Horovod, {size(of_rows)} are its allgather of rows; the rest is its allreduce of the dense layers."
    )


def plot(pairs: list[list[Run]], folder: str) -> list[str]:
    """Plot accuracy and perplexity against bytes sent; return the files."""
    try:
        import matplotlib
    except ImportError:
        print("matplotlib is not installed: no plot", file=sys.stderr)
        return []
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(11, 4.5), layout="constrained")
    scores = (
        ("accuracy", 100, "Fashion-MNIST, Keras' fit", "test accuracy (%)"),
        ("perplexity", 1, "text, tf.function", "perplexity of held-out text"),
    )
    for ax, pair, (key, scale, title, label) in zip(axes, pairs, scores, strict=True):
        for run, marker in zip(pair, "os", strict=True):
            ax.plot(
                [entry["bytes_sent"] / 1e6 for entry in run.history],
                [scale * entry[key] for entry in run.history],
                marker=marker,
                label=run.label,
            )
        ax.set(xscale="log", xlabel="bytes sent per rank since the start (MB, logarithmic)", ylabel=label, title=title)
        ax.grid(True, alpha=0.3, which="both")
        ax.legend()
    path = os.path.join(folder, "tensorflow_bytes.png")
    figure.savefig(path, dpi=150)
    plt.close(figure)
    return [path]


def arguments():
    parser = make_parser(__doc__.splitlines()[0], 3, MARKERS)
    parser.add_argument("--steps", type=int, default=300, help="steps on the text (default: %(default)s)")
    parser.add_argument("--text-spec", default=DEFAULT_ROWS_SPEC, help="compression on the text (default: %(default)s)")
    return parse_args(parser, MARKERS, ("spec", "text_spec"))


def run_all(args) -> list[list[Run]]:
    plan = [
        (
            FASHION,
            training_options(args, args.seed),
            {"none": "Fashion-MNIST, float32", args.spec: f"Fashion-MNIST, grace_ext {args.spec}"},
        ),
        (
            TEXT,
            ["--steps", str(args.steps), "--seed", str(args.seed)],
            {"horovod": "text, Horovod", args.text_spec: f"text, grace_ext {args.text_spec}"},
        ),
    ]
    pairs = []
    for example, options, labels in plan:
        pairs.append([])
        for compression, label in labels.items():
            number = sum(map(len, pairs)) + 1
            print(f"\n[{number}/4] {label}", file=sys.stderr, flush=True)
            pairs[-1].append(
                train(
                    label,
                    [*options, "--compression", compression],
                    os.path.join(args.out, f"{number}.jsonl"),
                    args.ranks,
                    args.timeout,
                    example,
                )
            )
    return pairs


def main():
    args = arguments()
    started = time.perf_counter()
    os.makedirs(args.out, exist_ok=True)
    pairs = run_all(args)
    made = f"{tensorflow_machine()}, by `{command_of('compare_tensorflow.py', args, 'make demo-tensorflow')}`"
    publish([(table(pairs), caption(pairs, args))], plot(pairs, args.out), args, made, MARKERS)
    print(f"all in {(time.perf_counter() - started) / 60:.1f} minutes")


if __name__ == "__main__":
    try:
        main()
    except RunFailed as error:
        sys.exit(f"[demo] error: {error}")
    except KeyboardInterrupt:
        sys.exit(130)
