"""Bytes on Flower's sockets and accuracy, with containers and with Flower's own float32; writes a section of docs/federated.md.

    python benchmarks/flower.py --data DIR

It runs examples/flower_fashion_mnist.py twice, and the same training over MPI, examples/fedavg_fashion_mnist.py. It can be
resumed: with --resume, what was measured before with the same options is kept. Ends with status 1 if a target is missed.
"""

import argparse
import json
import os
import shutil
import statistics
import sys

from _lib import ROOT, SHARED_CORES, as_markdown, finish
from _page import days, keep, part_of, read_part, write_section

EXAMPLES = os.path.join(ROOT, "examples")
LAST = 5  # evaluations whose mean is a run's accuracy
PLAIN = "flower"  # the example's name for Flower's own FedAvg
FEWER, POINTS = 40.0, 0.5  # the targets
LABELS = {"mpi": "grace_ext over MPI", "flower": "grace_ext under Flower", "float32": "Flower's FedAvg, float32"}


def options_of(name: str, args) -> dict:
    return {
        "clients": args.clients,
        "rounds": args.rounds,
        "compression": PLAIN if name == "float32" else args.compression,
        "seed": args.seed,
    }


def measure(name: str, args) -> dict:
    """Run one training, unless there is a result with the same options, and return its result."""
    out, options = os.path.join(args.raw, f"{name}.json"), options_of(name, args)
    if args.resume and os.path.exists(out):
        with open(out, encoding="utf-8") as file:
            before = json.load(file)
        if all(before["options"].get(key) == value for key, value in options.items()):
            return before
    given = [f"--{key}={value}" for key, value in options.items() if not (name == "mpi" and key == "clients")]
    given += ["--data", os.path.abspath(args.data), "--out", part_of(out)]
    if name == "mpi":
        mpirun = shutil.which("mpirun", path=os.path.dirname(sys.executable)) or "mpirun"
        command = [mpirun, "--oversubscribe", "-n", str(args.clients + 1), sys.executable]
        command += [os.path.join(EXAMPLES, "fedavg_fashion_mnist.py")]
    else:
        command = [sys.executable, os.path.join(EXAMPLES, "flower_fashion_mnist.py")]
        given += ["--limit", str(args.timeout)]
    print(f"[flower] {LABELS[name]}", flush=True)
    finish(name, [*command, *given], args.timeout + 120, SHARED_CORES)
    result = read_part(out)
    keep(result, out)
    return result


def accuracy(run: dict) -> float:
    """In percent: the mean of the last evaluations."""
    return 100 * statistics.mean(value for _, value in run["accuracy"][-LAST:])


def messages(run: dict, way: str) -> int | None:
    """The bytes of grace_ext's messages; None where there are none."""
    if way in run:
        return sum(run[way])
    return sum(report[way] for report in run["reports"]) or None


def document(runs: dict[str, dict], args) -> tuple[str, bool]:
    """Write the section; return it, and whether the targets are met."""
    whole = sum(runs["float32"]["socket_bytes"].values())
    rows = [
        [
            "",
            "spec",
            "messages down, MB",
            "messages up, MB",
            "sockets down, MB",
            "sockets up, MB",
            "fewer bytes on the sockets",
            "accuracy",
            "points against MPI",
        ]
    ]
    for name, run in runs.items():
        sockets, own = run.get("socket_bytes"), [messages(run, way) for way in ("sent", "received")]
        rows.append(
            [
                LABELS[name],
                "" if name == "float32" else f"`{args.compression}`",
                *("" if one is None else f"{one / 1e6:.2f}" for one in own),
                *([f"{sockets[way] / 1e6:.2f}" for way in ("down", "up")] if sockets else ["", ""]),
                f"{whole / sum(sockets.values()):.1f}×" if sockets else "",
                f"{accuracy(run):.2f} %",
                "" if name == "mpi" else f"{accuracy(run) - accuracy(runs['mpi']):+.2f}",
            ]
        )
    fewer = whole / sum(runs["flower"]["socket_bytes"].values())
    points = accuracy(runs["flower"]) - accuracy(runs["mpi"])
    is_met = [fewer >= FEWER, abs(points) <= POINTS]
    verdicts = ["met" if one else "**missed**" for one in is_met]
    text = (
        "Written by `benchmarks/flower.py`; do not edit between the markers. `examples/flower_fashion_mnist.py`: "
        f"{args.clients} clients, {args.rounds} rounds of one local epoch, all clients in every round, no evaluation on the "
        "clients; a superlink and supernodes as processes of their own, with TLS over loopback.\n\n"
        f"{as_markdown(rows)}\n\n"
        "- Messages: what grace_ext sends, headers included. Sockets: all bytes of the TCP connections between superlink and "
        "supernodes, counted by a relay between them: TLS, HTTP, the app that each supernode fetches, and its questions whether "
        "there is something to do, every 3 s, which cost more the slower the machine is.\n"
        f"- Accuracy: of the server's model on the test set, the mean of the last {LAST} evaluations, one seed.\n"
        f"- The target of at least {FEWER:g} times fewer bytes on the sockets, set before measuring, is {verdicts[0]} "
        f"({fewer:.1f}×). The target of at most {POINTS:g} points from the accuracy over MPI is {verdicts[1]} ({points:+.2f}).\n\n"
        f"Measured {days([run['date'] for run in runs.values()])} on "
        f"{' and '.join(sorted({run['machine'] for run in runs.values()}))}, all processes on the same cores, "
        f"by `python benchmarks/flower.py --data DIR --clients {args.clients} --rounds {args.rounds}`.\n"
    )
    return text, all(is_met)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", required=True, help="folder of the data set (see mpirun/fetch_fashion_mnist.py)")
    parser.add_argument("--out", default=os.path.join(ROOT, "docs"), help="folder of federated.md")
    parser.add_argument(
        "--raw", default=os.path.join(ROOT, "benchmarks", "results", "flower"), help="folder of measurements"
    )
    parser.add_argument("--resume", action="store_true", help="keep what was measured before with the same options")
    parser.add_argument("--clients", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--compression", default="topk:0.05/rice/lloyd:0.05")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--timeout", type=float, default=7200, help="seconds of one run (default: %(default)s)")
    args = parser.parse_args()
    os.makedirs(args.raw, exist_ok=True)
    text, is_met = document({name: measure(name, args) for name in LABELS}, args)
    print(f"[flower] written: {write_section(args.out, 'flower', 'Under Flower', text, 'federated.md')}")
    return 0 if is_met else 1


if __name__ == "__main__":
    sys.exit(main())
