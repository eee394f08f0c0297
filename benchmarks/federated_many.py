"""FedAvg with many clients, some of which take part in a round, in one process; writes a section of docs/federated.md.

    python benchmarks/federated_many.py --data DIR

Methods, model, split and training are those of benchmarks/federated.py. Results are kept in benchmarks/results/federated-many, and a
run whose result is there is not repeated. Ends with status 1 if the target is missed. About half an hour on two idle cores.
"""

import concurrent.futures
import functools
import itertools
import json
import multiprocessing
import os
import statistics
import sys

import torch
from _federated_in_process import train
from _lib import ROOT, RunFailed, as_markdown, machine
from _page import by_seed, keep, parse_results, path_of, results_parser, write_section
from fashion_mnist import load
from federated import FEDAVG, LAST, METHODS, Method
from federated_training import Epochs, lda_split, mlp, vector_of

from grace_ext.federated import Client, SenderMean, Server, WeightedMean

RESULTS = os.path.join(ROOT, "benchmarks", "results", "federated-many")
SENDERS = "-senders"  # behind the name of a method: with the mean over those who have sent an element
SHOWN = (FEDAVG, "topr", f"topr{SENDERS}", "dr-fit-poly", "dr-bf-p0-qsgd", "best", f"best{SENDERS}")
FEWER, POINTS = 0.035, 0.5  # the target of benchmarks/federated.py, for the way up
ALPHA = 0.5

loaded = functools.cache(load)


def method(name: str) -> Method:
    return METHODS[name.removesuffix(SENDERS)]


def run(name: str, seed: int, args) -> None:
    """Train, and write the result."""
    torch.set_num_threads(1)
    data, test = (loaded(args.data, part) for part in ("train", "t10k"))
    torch.manual_seed(seed)
    net, spec = mlp(), method(name).spec
    start = vector_of(net)
    samples = {"weights": "samples", "most_samples": len(data[1])}
    mean = SenderMean() if name.endswith(SENDERS) else WeightedMean()
    server = Server(start, args.clients, spec, sampled=args.sampled, mean=mean, seed=seed, **samples)
    clients = []
    for number, chosen in enumerate(lda_split(data[1].numpy(), args.clients, ALPHA, seed)):
        images, labels = (part[torch.from_numpy(chosen)] for part in data)
        work = Epochs(net, images, labels, batch=64, number=number, seed=seed, epochs=1, lr=0.001)
        clients.append((Client(start, spec, number=number, seed=seed), work))
    accuracies, up, down = train(
        server, clients, args.rounds, lambda round_: round_ % args.every == 0 or round_ == args.rounds, net, test
    )
    options = {key: getattr(args, key) for key in ("clients", "sampled", "rounds", "every")}
    out = path_of(args.results, name, seed)
    keep({"options": options, "seed": seed, "accuracies": accuracies, "up": up, "down": down}, out)
    print(f"[federated_many] {name}, seed {seed}: {accuracies[-1]:.2f} %, {up:.4f} up, {down:.4f} down", flush=True)


def results(folder: str) -> dict[str, dict[int, dict]]:
    """Read the results, by method and seed. Raises RunFailed: Their options differ."""
    found = {name: runs for name in SHOWN if (runs := by_seed(folder, name))}
    if len({json.dumps(run["options"]) for runs in found.values() for run in runs.values()}) != 1:
        raise RunFailed(f"the results in {folder} are not of the same options")
    return found


def accuracy(run: dict) -> float:
    return statistics.mean(run["accuracies"][-LAST:])


def page(args) -> int:
    """Write the section; return 0 if the target is met."""
    found = results(args.results)
    rows = [["", "volume down", "volume up", "seeds", "accuracy", "from … to", "points"]]
    judged = None
    for name, runs in found.items():
        ends = {seed: accuracy(run) for seed, run in runs.items()}
        points = [ends[seed] - accuracy(found[FEDAVG][seed]) for seed in ends if seed in found.get(FEDAVG, {})]
        up, down = (statistics.mean(run[way] for run in runs.values()) for way in ("up", "down"))
        gained = statistics.mean(points) if points else None
        if method(name).is_judged and gained is not None:
            judged = judged or up <= FEWER and gained >= -POINTS
        rows.append(
            [
                method(name).label + (", mean over senders" if name.endswith(SENDERS) else ""),
                *(f"{volume:.4f}" for volume in (down, up)),
                str(len(ends)),
                f"{statistics.mean(ends.values()):.2f} %",
                f"{min(ends.values()):.2f} … {max(ends.values()):.2f}",
                "" if name == FEDAVG or gained is None else f"{gained:+.2f}",
            ]
        )
    some = next(iter(next(iter(found.values())).values()))
    options, dates = some["options"], sorted({run["date"] for runs in found.values() for run in runs.values()})
    verdict = "not measured" if judged is None else "met" if judged else "**missed**"
    text = f"""\
Written by `benchmarks/federated_many.py`; do not edit. {options["clients"]} clients with memory residual,
{options["sampled"]} of which take part in a round, {options["rounds"]} rounds, in one process; model, split and local training are
those of the table of FedAvg above.

{as_markdown(rows)}

- A client takes part in every tenth round or so. Its residual waits meanwhile, and it has to be told what the rounds that it missed
  have changed: the containers of all those rounds, or, where that is shorter, the whole model. This is why so much more goes
  down than up.
- Accuracy: the mean of the last {LAST} evaluations, {options["every"]} rounds apart. Points: against float32 with the same seeds.
- The target of the table above for our way up (at most {FEWER:g} of the bytes, at most {POINTS:g} points lost) is {verdict}.

Measured on {" and ".join(dates)} on {machine()}, by `python benchmarks/federated_many.py --data DIR`.
"""
    print(write_section(args.out, "federated-many", "Many clients", text, "federated.md"))
    return 0 if judged else 1


def main() -> int:
    parser = results_parser(__doc__, "folder of the data set (see mpirun/fetch_fashion_mnist.py)", "federated.md", RESULTS)
    parser.add_argument("--methods", nargs="+", choices=SHOWN, default=SHOWN)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--clients", type=int, default=100)
    parser.add_argument("--sampled", type=int, default=10, help="clients that take part in a round")
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--every", type=int, default=10, help="rounds between evaluations")
    parser.add_argument("--jobs", type=int, default=2, help="runs at a time")
    args = parse_results(parser)
    if not args.page:
        wanted = [
            (name, seed)
            for seed, name in itertools.product(args.seeds, args.methods)
            if not os.path.exists(path_of(args.results, name, seed))
        ]
        with concurrent.futures.ProcessPoolExecutor(args.jobs, multiprocessing.get_context("spawn")) as pool:
            list(pool.map(run, *zip(*wanted, strict=True), [args] * len(wanted)) if wanted else ())
    return page(args)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except RunFailed as error:
        sys.exit(f"[federated_many] error: {error}")
