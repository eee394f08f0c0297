"""Do ranks stay bit-identical when each of them pauses at random times? On four hosts, for each communicator.

    python benchmarks/delays.py

Writes the section "Random delays" of docs/benchmarks.md. Needs root, for mpirun/hosts. Ends with status 1 if a run hangs or
ranks differ. About 8 minutes on two idle cores.
"""

import argparse
import datetime
import json
import os
import sys
import tempfile
import time

import numpy as np
import xxhash
from _hosts import Hosts, Job, JobFailed
from _lib import ROOT, as_markdown, machine
from _page import write_section

HOSTS = 4
LAUNCHERS = ("horovodrun --gloo", "mpirun")
COMMUNICATORS = ("allgather", "sharded", "tree", "hierarchical")
EVERY = 100  # steps between comparisons of the checksums of parameters
SPEC = "topk:0.01/rice/qsgd:7"
PLACES, RARE, LONG = 3, 0.01, 20  # pauses per step; share of long ones, and their length relative to others


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--delay", type=float, default=5.0, help="milliseconds that a rank pauses in a step, on average")
    parser.add_argument("--launchers", nargs="+", choices=LAUNCHERS, default=LAUNCHERS)
    parser.add_argument("--communicators", nargs="+", default=COMMUNICATORS)
    parser.add_argument("--name", default="delays", help="name of the set of hosts")
    parser.add_argument("--timeout", type=float, default=900, help="seconds for all runs of a launcher")
    parser.add_argument("--out", default=os.path.join(ROOT, "docs"), help="folder of benchmarks.md")
    parser.add_argument("--log-file", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.log_file:
        return work(args)
    rows = []
    with Hosts(args.name, HOSTS, "none") as up, tempfile.TemporaryDirectory() as folder:
        for launcher in args.launchers:
            rows += [(launcher, record) for record in run(up, launcher, os.path.join(folder, launcher), args)]
    write_section(args.out, "delays", "Random delays", document(rows, args))
    return 0 if all(is_good(record, args) for _, record in rows) else 1


def run(up: Hosts, launcher: str, log: str, args) -> list[dict]:
    """Return a record of each communicator; one without steps where the job did not finish its run."""
    options = [
        "--log-file",
        log,
        "--steps",
        str(args.steps),
        "--delay",
        str(args.delay),
        "--communicators",
        *args.communicators,
    ]
    for attempt in (1, 2):
        try:
            Job(up, launcher, HOSTS, [os.path.abspath(__file__), *options]).end(args.timeout)
        except JobFailed as error:
            print(f"[delays] {launcher}: {error}", file=sys.stderr, flush=True)
            if attempt == 1 and not os.path.exists(log):
                continue  # mpirun occasionally hangs at the start: see docs/cluster.md
        break
    records = {}
    if os.path.exists(log):
        with open(log, encoding="utf-8") as file:
            records = {record["communicator"]: record for record in map(json.loads, file)}
    found = [records.get(name, {"communicator": name, "steps": 0}) for name in args.communicators]
    for record in found:
        print(f"{launcher:18} {record['communicator']:13} {said(record, args)}", flush=True)
    return found


def said(record: dict, args) -> str:
    if not record["steps"]:
        return "did not end"
    return (
        f"{record['steps']} steps in {record['seconds']:.1f} s, {record['compared']} comparisons: "
        f"{'bit-identical' if is_good(record, args) else 'RANKS DIFFER'}"
    )


def is_good(record: dict, args) -> bool:
    return record["steps"] == args.steps and record["identical"] == record["compared"] > 0


def work(args) -> int:
    """Run one rank: all communicators, one after the other."""
    import horovod.torch as hvd
    import torch

    hvd.init()
    torch.set_num_threads(1)
    for communicator in args.communicators:
        record = train(communicator, args)
        if hvd.rank() == 0:
            with open(args.log_file, "a", encoding="utf-8") as file:
                file.write(json.dumps(record) + "\n")
    hvd.shutdown()
    return 0


def train(communicator: str, args) -> dict:
    import horovod.torch as hvd
    import torch

    from grace_ext.adapters.horovod_torch import DistributedOptimizer
    from grace_ext.transport import topology

    os.environ[topology.HOSTNAME_VARIABLE] = f"pair{hvd.rank() // 2}"  # so that `hierarchical` has hosts with two ranks
    torch.manual_seed(0)
    net = torch.nn.Sequential(
        torch.nn.Linear(100, 300), torch.nn.ReLU(), torch.nn.Linear(300, 200), torch.nn.ReLU(), torch.nn.Linear(200, 10)
    )
    optimizer = DistributedOptimizer(
        torch.optim.SGD(net.parameters(), 0.01, momentum=0.9),
        net.named_parameters(),
        SPEC,
        communicator=communicator,
        bucket_bytes=50_000,
    )
    hvd.broadcast_parameters(net.state_dict(), root_rank=0)
    pauses = Pauses(args.delay / 1e3 / PLACES, hvd.rank())
    net[3].register_full_backward_hook(lambda *_: pauses.pause())  # after the last layer's gradients, before the others'
    data = torch.Generator().manual_seed(hvd.rank())
    compared = identical = 0
    started = time.perf_counter()
    for step in range(1, args.steps + 1):
        optimizer.zero_grad()
        pauses.pause()
        x, y = torch.randn(8, 100, generator=data), torch.randint(0, 10, (8,), generator=data)
        torch.nn.functional.cross_entropy(net(x), y).backward()
        pauses.pause()
        optimizer.step()
        if step % EVERY == 0 or step == args.steps:
            digests = hvd.allgather(torch.from_numpy(digest(net)), name=f"digests.{communicator}").view(hvd.size(), -1)
            compared += 1
            identical += int((digests == digests[0]).all()) and all(p.isfinite().all() for p in net.parameters())
            if hvd.rank() == 0:
                print(f"[delays] {communicator}: {step} steps", flush=True)  # shows where a job hangs
    return {
        "communicator": communicator,
        "steps": args.steps,
        "seconds": time.perf_counter() - started,
        "paused": pauses.total,
        "longest": pauses.longest,
        "compared": compared,
        "identical": int(identical),
        "buckets": len(optimizer._grace.exchange.buckets),
    }


def digest(net) -> np.ndarray:
    """Return a checksum of all bits of all parameters, uint8[8]."""
    state = xxhash.xxh64()
    for p in net.parameters():
        state.update(p.detach().numpy().tobytes())
    return np.frombuffer(state.digest(), np.uint8).copy()


class Pauses:
    """The pauses of one rank: exponentially distributed, and occasionally a long one."""

    def __init__(self, mean: float, rank: int):
        self._mean, self._random = mean / (1 + RARE * (LONG - 1)), np.random.default_rng(rank)
        self.total = self.longest = 0.0

    def pause(self) -> None:
        seconds = self._random.exponential(self._mean) * (LONG if self._random.random() < RARE else 1)
        time.sleep(seconds)
        self.total += seconds
        self.longest = max(self.longest, seconds)


def document(rows: list[tuple[str, dict]], args) -> str:
    table = [["launcher", "communicator", "seconds", "comparisons", "bit-identical", "rank 0 paused", "its longest pause"]]
    for launcher, record in rows:
        cells = ["**did not end**", *4 * ["–"]]
        if record["steps"]:
            cells = [
                f"{record['seconds']:.1f}",
                str(record["compared"]),
                str(record["identical"]),
                f"{record['paused']:.1f} s",
                f"{1e3 * record['longest']:.0f} ms",
            ]
        table.append([f"`{launcher}`", f"`{record['communicator']}`", *cells])
    verdict = "met" if all(is_good(record, args) for _, record in rows) else "**missed**"
    buckets = max(record.get("buckets", 0) for _, record in rows)
    return (
        "\n\n".join(
            [
                f"Written by `benchmarks/delays.py`; do not edit. {HOSTS} hosts with one rank each (network namespaces, "
                f"see [cluster.md](cluster.md)) train a network of 92,000 parameters in {buckets} buckets for "
                f"{args.steps:,} steps, with {SPEC} and memory residual. Each rank pauses {PLACES} times in a step: before "
                f"the forward pass, in the middle of the backward pass, and before `step()`; on average {args.delay:g} ms "
                "in all. Each rank draws the durations independently from an exponential distribution, and one in "
                f"{1 / RARE:.0f} pauses is {LONG} times as long. Every {EVERY} steps and at the end, the ranks compare a "
                "checksum of all bits of all parameters. For `hierarchical`, two ranks at a time count as being on one "
                "host.",
                as_markdown(table),
                f"- The target, set before measuring: no run hangs, and ranks are bit-identical in every comparison. It is {verdict}.",
                f"Measured on {datetime.date.today().isoformat()} on {machine()}, by `python benchmarks/delays.py`. The "
                "ranks share the cores, so the seconds say nothing about speed.",
            ]
        )
        + "\n"
    )


if __name__ == "__main__":
    sys.exit(main())
