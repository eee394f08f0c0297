"""Train the example three times from the same seed and compare: Horovod's float32, Horovod's fp16, grace_ext.

    python examples/compare_fashion_mnist.py --data DIR --out DIR

`make demo` calls it. It prints the table and writes it to OUT/comparison.md, with two plots next to it.
"""

import sys
import time

from _comparison import command_of, machine, make_parser, parse_args, publish_runs, train_all
from _launch import Run, RunFailed

MARKERS = "<!-- demo:begin -->", "<!-- demo:end -->"
#: For grace_ext, whose containers then do not go by Horovod's collectives. With Horovod's own cycle of 1 ms they do, and Horovod's
#: thread keeps a core busy. Horovod's own gradients would have to wait for so long a cycle.
ENV = {"HOROVOD_CYCLE_TIME": "50"}


def captions(runs: list[Run], ranks: int, epochs: int) -> tuple[str, str]:
    """Explain the figures of the two tables."""
    layers = next((run.last["compressed_layers_ratio"] for run in runs if run.last["compressed_layers_ratio"]), None)
    measured = (
        f"Ranks: {ranks}, on one machine; epochs: {epochs}; the same seed. Bytes sent: what one rank sends per step, "
        "headers included; for an allreduce (a ring) 2(n−1)/n times its payload, for an allgather n−1 times its "
        "container; with 2 ranks both are the payload. Ratio: against Horovod float32. "
        + (f"The compressed layers alone: {layers:.0f}×. " if layers else "")
        + "Codec: selecting, encoding, decoding. Exchange: the time that a step waits for the others and for Horovod; "
        "what Horovod does in the background of the backward pass, and its conversion to fp16, count as compute. "
        f"grace_ext was started with {' '.join(f'{name}={value}' for name, value in ENV.items())}, so that its containers go "
        "by a group of Gloo beside Horovod."
    )
    projected = (
        "Projected, not measured: compute time (the least of the runs, for all of them) plus codec time plus "
        "bytes sent / bandwidth; without latency, and with nothing hidden behind the backward pass."
    )
    return measured, projected


def main():
    parser = make_parser(__doc__.splitlines()[0], 3, MARKERS)
    parser.add_argument("--memory", default="residual")
    args = parse_args(parser, MARKERS)
    started = time.perf_counter()
    ours = f"grace_ext {args.spec}"
    methods = {"Horovod float32": ("float32", "none"), "Horovod fp16": ("fp16", "fp16"), ours: ("grace_ext", args.spec)}
    runs = train_all(methods, args, own_env={ours: ENV})
    made = f"{machine()}, by `{command_of('compare_fashion_mnist.py', args, 'make demo')}`"
    publish_runs(runs, args, captions(runs, args.ranks, args.epochs), made, MARKERS)
    print(f"all in {(time.perf_counter() - started) / 60:.1f} minutes")


if __name__ == "__main__":
    try:
        main()
    except RunFailed as error:
        sys.exit(f"[demo] error: {error}")
    except KeyboardInterrupt:
        sys.exit(130)
