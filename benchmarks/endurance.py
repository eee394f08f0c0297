"""Do residuals and the process's memory stay bounded over many steps? Writes docs/endurance.md and docs/endurance.png.

    python benchmarks/endurance.py --data DIR

Ends with status 1 if they do not. About 10 minutes on two idle cores.
"""

import argparse
import datetime
import json
import os
import sys
import time

from _lib import ROOT, SHARED_CORES, Run, RunFailed, as_markdown, machine, train

#: label -> compression, memory
METHODS = {
    "top-k 1 %, residual": ("topk:0.01/rice/qsgd:7", "residual"),
    "top-k 0.1 %, dgc": ("topk:0.001/rice/qsgd:7", "dgc"),
    "1-bit, residual": ("dense/onebit", "residual"),
    "powersgd rank 2, residual": ("powersgd:2", "residual"),
}
LEVEL = 1.25  # most growth of the largest norm from the first half to the second; a random walk gets to 1.41
GROWTH = 1.02  # most growth of the resident memory between a tenth of the steps and the end
POINTS = 200  # measurements of a run


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", required=True, help="folder of the data set (see mpirun/fetch_fashion_mnist.py)")
    parser.add_argument("--out", default=os.path.join(ROOT, "docs"), help="folder for the table and the plot")
    parser.add_argument("--logs", default=os.path.join(ROOT, "build", "endurance"), help="folder for the runs' logs")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--worker", nargs=2, metavar=("COMPRESSION", "MEMORY"), help=argparse.SUPPRESS)
    parser.add_argument("--log-file", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        return work(args)
    os.makedirs(args.logs, exist_ok=True)
    started = time.perf_counter()
    runs = {}
    for number, (label, parts) in enumerate(METHODS.items()):
        print(f"\n{label}", file=sys.stderr, flush=True)
        options = ["--data", os.path.abspath(args.data), "--steps", str(args.steps), "--worker", *parts]
        runs[label] = train(
            label, options, os.path.join(args.logs, f"{number}.jsonl"), args.ranks, 3600, example=__file__, env=SHARED_CORES
        )
    text = document(runs, args)
    with open(os.path.join(args.out, "endurance.md"), "w", encoding="utf-8") as file:
        file.write(text)
    plot(runs, os.path.join(args.out, "endurance.png"))
    print(f"\n{text}\nwritten in {args.out}; all in {(time.perf_counter() - started) / 60:.1f} minutes")
    return 0 if all(map(is_bounded, runs.values())) else 1


def work(args) -> int:
    """Run one rank: a small network with a constant learning rate, so that gradients do not vanish."""
    import horovod.torch as hvd
    import torch
    from fashion_mnist import load
    from tqdm import trange

    from grace_ext.adapters.horovod_torch import DistributedOptimizer

    hvd.init()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    images, labels = load(args.data, "train")
    net = torch.nn.Sequential(
        torch.nn.Flatten(),
        torch.nn.Linear(784, 128),
        torch.nn.ReLU(),
        torch.nn.Linear(128, 64),
        torch.nn.ReLU(),
        torch.nn.Linear(64, 10),
    )
    compression, memory = args.worker
    momentum = 0.0 if memory == "dgc" else 0.9
    optimizer = DistributedOptimizer(
        torch.optim.SGD(net.parameters(), 0.01, momentum=momentum), net.named_parameters(), compression, memory=memory
    )
    hvd.broadcast_parameters(net.state_dict(), root_rank=0)
    shuffled = torch.Generator().manual_seed(hvd.rank())
    average = 0.0  # of the exchanged gradient's norm
    for step in trange(1, args.steps + 1, disable=hvd.rank() > 0):
        batch = torch.randint(len(images), (16,), generator=shuffled)
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(net(images[batch]), labels[batch])
        loss.backward()
        optimizer.step()
        average = 0.95 * average + 0.05 * norm(p.grad for p in net.parameters()) / (1 - 0.95**step)
        if step % (args.steps // POINTS) == 0 and hvd.rank() == 0:
            residuals = optimizer.state_dict()["grace_ext"]["memories"][0]["residual"]
            with open(args.log_file, "a") as log:
                print(
                    json.dumps(
                        {
                            "step": step,
                            "loss": loss.item(),
                            "residual": norm(residuals.values()),
                            "gradient": average,
                            "resident_bytes": resident_bytes(),
                        }
                    ),
                    file=log,
                )
    return 0


def norm(tensors) -> float:
    """Compute the L2 norm of all tensors together."""
    return sum(float(tensor.double().pow(2).sum()) for tensor in tensors) ** 0.5


def resident_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def halves(run: Run) -> tuple[float, float]:
    """Return the largest residual norm of each half of the run."""
    norms = [entry["residual"] for entry in run.history]
    return max(norms[: len(norms) // 2]), max(norms[len(norms) // 2 :])


def resident(run: Run) -> tuple[int, int]:
    """Return the resident bytes after a tenth of the steps and at the end."""
    return run.history[len(run.history) // 10]["resident_bytes"], run.last["resident_bytes"]


def is_bounded(run: Run) -> bool:
    first, second = halves(run)
    early, late = resident(run)
    return second <= LEVEL * first and late <= GROWTH * early


def document(runs: dict[str, Run], args) -> str:
    table = [
        [
            "",
            "largest residual norm, first half",
            "second half",
            "norm of the exchanged gradient at the end",
            "resident memory after a tenth",
            "at the end",
        ]
    ]
    for label, run in runs.items():
        early, late = resident(run)
        table.append(
            [
                label,
                *(f"{value:.3g}" for value in (*halves(run), run.last["gradient"])),
                *(f"{count / 2**20:.1f} MiB" for count in (early, late)),
            ]
        )
    met = all(map(is_bounded, runs.values()))
    options = "".join(
        f" --{name} {getattr(args, name)}"
        for name, value in (("ranks", 4), ("steps", 10_000))
        if getattr(args, name) != value
    )
    return (
        "\n\n".join(
            [
                "# Endurance: residuals and memory over many steps",
                f"Written by `benchmarks/endurance.py`; do not edit. {args.ranks} ranks train a network of 109,000 "
                f"parameters on Fashion-MNIST with SGD at a constant learning rate for {args.steps:,} steps. The residual "
                "norm is the L2 norm over all tensors of what error feedback holds back on rank 0.",
                as_markdown(table),
                "![residual norms against steps](endurance.png)",
                f"- The target, set before measuring: no residual norm of the second half is above {LEVEL} times the "
                "largest of the first half, and "
                f"resident memory at the end is at most {GROWTH - 1:.0%} above that after a tenth of the steps. It is "
                f"{'met' if met else '**missed**'}.",
                f"Measured on {datetime.date.today().isoformat()} on {machine()}, by "
                f"`python benchmarks/endurance.py --data DIR{options}`.",
            ]
        )
        + "\n"
    )


def plot(runs: dict[str, Run], file: str) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, ax = plt.subplots(figsize=(7.5, 4.5), layout="constrained")
    for (label, run), style in zip(runs.items(), ("-", "--", "-.", ":"), strict=True):
        ax.plot([entry["step"] for entry in run.history], [entry["residual"] for entry in run.history], style, label=label)
    ax.set(xlabel="steps", ylabel="L2 norm of rank 0's residual", yscale="log", title="Error feedback over many steps")
    ax.grid(True, alpha=0.3, which="both")
    figure.legend(loc="outside lower center", ncols=2, frameon=False)
    figure.savefig(file, dpi=150)
    plt.close(figure)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except RunFailed as error:
        sys.exit(f"[endurance] error: {error}")
