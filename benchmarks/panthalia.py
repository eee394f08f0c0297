"""What Panthalia's scheme loses its accuracy by: parts of it are taken away one at a time; writes a section of docs/federated.md.

    python benchmarks/panthalia.py --data DIR

Server and clients are in one process. About 6 minutes on two idle cores.
"""

import argparse
import concurrent.futures
import datetime
import functools
import itertools
import multiprocessing
import os
import statistics
import sys

import torch
from _federated_in_process import train
from _lib import ROOT, as_markdown, machine
from _page import write_section
from fashion_mnist import load
from federated_training import Gradient, lda_split, vector_of
from torch import nn

from grace_ext.federated import Client, Server

WHOLE, LAST = "dense/raw", 5  # evaluations whose mean is a run's accuracy
PANTHALIA = "panthalia"
#: Spec up, spec down, the server's optimizer ({lr}, {twice} and {steps} are filled in), memory of the clients; and its baseline.
ADAMW, SGD = "adamw:{lr}:weight_decay=0.01:steps={steps}", "sgd:0.1:momentum=0.9"
NO_MOMENTUM, TWICE = f"{ADAMW}:beta1=0", ADAMW.replace("{lr}", "{twice}")
METHODS = {
    "float32": (WHOLE, WHOLE, ADAMW, "none", None),
    "Panthalia, 1 %": (PANTHALIA, PANTHALIA, ADAMW, "residual", "float32"),
    "without the 8 bits": ("dct:64/topk:0.01:per=chunk/auto/raw",) * 2 + (ADAMW, "residual", "float32"),
    "without the DCT, 8 bits": ("topk:0.01/auto/minmax:8",) * 2 + (ADAMW, "residual", "float32"),
    "without the DCT and the 8 bits": ("topk:0.01/auto/raw",) * 2 + (ADAMW, "residual", "float32"),
    "float32 from the server": (PANTHALIA, WHOLE, ADAMW, "residual", "float32"),
    "float32 from the clients": (WHOLE, PANTHALIA, ADAMW, "none", "float32"),
    "float32, no momentum on the server": (WHOLE, WHOLE, NO_MOMENTUM, "none", "float32"),
    "Panthalia, 1 %, no momentum on the server": (PANTHALIA, PANTHALIA, NO_MOMENTUM, "residual", "float32"),
    "float32, twice the learning rate": (WHOLE, WHOLE, TWICE, "none", None),
    "Panthalia, 1 %, no momentum, twice the learning rate": (
        *(PANTHALIA, PANTHALIA, f"{TWICE}:beta1=0", "residual"),
        "float32, twice the learning rate",
    ),
    "float32, SGD on the server": (WHOLE, WHOLE, SGD, "none", None),
    "Panthalia, 1 %, SGD on the server": (PANTHALIA, PANTHALIA, SGD, "residual", "float32, SGD on the server"),
}


loaded = functools.cache(load)


def network(hidden: list[int]) -> nn.Sequential:
    """Make a network of fully connected layers; with [512, 256] it is the example's."""
    sizes = [784, *hidden, 10]
    layers = [layer for pair in itertools.pairwise(sizes) for layer in (nn.Linear(*pair), nn.ReLU())]
    return nn.Sequential(nn.Flatten(), *layers[:-1])


def run(label: str, args) -> tuple[float, float, float]:
    """Train; return the accuracy in percent, and the mean bytes of a message up and down as shares of float32."""
    spec_up, spec_down, optimizer, memory, _ = METHODS[label]
    torch.set_num_threads(1)
    data, test = (loaded(args.data, part) for part in ("train", "t10k"))
    torch.manual_seed(args.seed)
    net = network(args.hidden)
    start = vector_of(net)
    server = Server(
        start,
        args.clients,
        spec_down,
        optimizer=optimizer.format(lr=args.lr, twice=2 * args.lr, steps=args.rounds),
        weights="samples",
        most_samples=len(data[1]),
        memory=memory,
        seed=args.seed,
    )
    split = lda_split(data[1].numpy(), args.clients, 0.5, args.seed)
    clients = []
    for number, chosen in enumerate(split):
        images, labels = (part[torch.from_numpy(chosen)] for part in data)
        work = Gradient(net, images, labels, batch=64, number=number, seed=args.seed, batches=1)
        clients.append((Client(start, spec_up, memory=memory, number=number, seed=args.seed), work))
    first = args.rounds - LAST * args.every
    accuracies, up, down = train(
        server, clients, args.rounds, lambda round_: round_ > first and (args.rounds - round_) % args.every == 0, net, test
    )
    print(f"[panthalia] {label}: {statistics.mean(accuracies):.2f} %", flush=True)
    return statistics.mean(accuracies), up, down


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", required=True, help="folder of the data set (see mpirun/fetch_fashion_mnist.py)")
    parser.add_argument("--out", default=os.path.join(ROOT, "docs"), help="folder of federated.md")
    parser.add_argument("--clients", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=500)
    parser.add_argument("--hidden", type=int, nargs="+", default=[512, 256], help="sizes of the hidden layers")
    parser.add_argument("--jobs", type=int, default=2, help="methods that are trained at a time")
    parser.add_argument("--every", type=int, default=10, help="rounds between the last evaluations")
    parser.add_argument("--lr", type=float, default=0.002, help="of AdamW")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    if args.jobs == 1:
        found = {label: run(label, args) for label in METHODS}
    else:
        with concurrent.futures.ProcessPoolExecutor(args.jobs, multiprocessing.get_context("spawn")) as pool:
            found = dict(zip(METHODS, pool.map(run, METHODS, [args] * len(METHODS)), strict=True))
    rows = [["", "up", "down", "volume up", "volume down", "accuracy", "against float32, points"]]
    for label, method in METHODS.items():
        accuracy, up, down = found[label]
        lost = f"{accuracy - found[method[4]][0]:+.2f}" if method[4] else ""
        rows.append([label, f"`{method[0]}`", f"`{method[1]}`", f"{up:.4f}", f"{down:.4f}", f"{accuracy:.2f} %", lost])
    sizes = " ".join(map(str, args.hidden))
    text = f"""\
Panthalia's scheme without parts of it: {args.clients} clients, {args.rounds} rounds of 1 batch of 64, a network with hidden layers of
{sizes}, Fashion-MNIST split by LDA with alpha 0.5. AdamW on the server begins at {args.lr} and falls to 0 as a cosine; SGD has
`{SGD}`, compared with itself. Accuracy is the mean of the last {LAST} evaluations, {args.every} rounds apart; one seed.

{as_markdown(rows)}

Measured on {datetime.date.today().isoformat()} on {machine()}, by `python benchmarks/panthalia.py --data DIR --clients {args.clients}
--rounds {args.rounds} --every {args.every} --hidden {sizes}`.
"""
    write_section(args.out, "panthalia", "What Panthalia's accuracy is lost by", text, "federated.md")
    return 0


if __name__ == "__main__":
    sys.exit(main())
