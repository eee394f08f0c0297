"""Train the DDP example from the same seed and compare: float32, torch's hooks for fp16 and PowerSGD, grace_ext's hook.

    python examples/compare_ddp.py --data DIR --out DIR

`make demo-ddp` calls it. It prints the table and writes it to OUT/comparison.md, with two plots next to it.
"""

import os
import sys
import time

from _comparison import command_of, machine, make_parser, parse_args, publish_runs, train_all
from _launch import HERE, Run, RunFailed, torchrun

EXAMPLE = os.path.join(HERE, "pytorch_ddp_fashion_mnist.py")
MARKERS = "<!-- demo-ddp:begin -->", "<!-- demo-ddp:end -->"


def captions(runs: list[Run], ranks: int, epochs: int) -> tuple[str, str]:
    """Explain the figures of the two tables."""
    layers = next((run.last["compressed_layers_ratio"] for run in runs if run.last["compressed_layers_ratio"]), None)
    measured = (
        f"Ranks: {ranks}, on one machine, over Gloo; epochs: {epochs}; the same seed. Compute: a step of the same model "
        "without DDP, before the training, while all ranks compute. Codec: selecting, encoding, decoding, partly beside "
        "the backward pass. Exchange: the rest of a step; what torch's hooks compute cannot be told from it. Bytes sent: "
        "what one rank sends per step, headers included; for an allreduce (a ring) 2(n−1)/n times its payload, for an "
        "allgather n−1 times its container. Ratio: against DDP float32."
        + (f" The compressed layers alone: {layers:.0f}×." if layers else "")
    )
    projected = (
        "Projected, not measured: compute time (the least of the runs, for all of them) plus codec time plus bytes sent / "
        "bandwidth; without latency, with nothing hidden behind the backward pass, and without what torch's hooks compute, "
        "which is in their favour."
    )
    return measured, projected


def main():
    parser = make_parser(__doc__.splitlines()[0], 2, MARKERS)
    parser.add_argument("--memory", default="residual")
    parser.add_argument("--powersgd", action="store_true", help="also train with torch's PowerSGD hook, rank 4")
    args = parse_args(parser, MARKERS)
    started = time.perf_counter()
    methods = {"DDP float32": ("float32", "none"), "DDP fp16_compress_hook": ("fp16", "fp16")}
    if args.powersgd:
        methods["DDP powerSGD_hook, rank 4"] = "powersgd", "powersgd"
    methods[f"grace_ext {args.spec}"] = "grace_ext", args.spec
    runs = train_all(
        methods, args, EXAMPLE, {"OMP_NUM_THREADS": "1"}, torchrun
    )  # torchrun's default; set here, it prints no notice
    made = f"{machine((('PyTorch', 'torch'),))}, by `{command_of('compare_ddp.py', args, 'make demo-ddp')}`"
    publish_runs(runs, args, captions(runs, args.ranks, args.epochs), made, MARKERS)
    print(f"all in {(time.perf_counter() - started) / 60:.1f} minutes")


if __name__ == "__main__":
    try:
        main()
    except RunFailed as error:
        sys.exit(f"[demo] error: {error}")
    except KeyboardInterrupt:
        sys.exit(130)
