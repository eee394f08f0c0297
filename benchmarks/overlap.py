"""How much of the codecs' work overlaps with backward? Writes a section of docs/benchmarks.md and docs/overlap.png.

    python benchmarks/overlap.py

Ends with status 1 if steps wait for more than a fifth of it. About two minutes.
"""

import argparse
import datetime
import json
import os
import statistics
import sys
import time
from collections.abc import Callable

from _lib import ROOT, SHARED_CORES, RunFailed, as_markdown, finish, machine
from _page import write_section

COMMUNICATORS = ("allgather", "sharded")
LAUNCHERS = {"horovodrun --mpi": "--mpi", "horovodrun --gloo": "--gloo"}
WIDTHS = (256, *[1024] * 9, 10)
BUCKET_BYTES = 4 * 2**20
STEPS, WARM_UP, DRAWN = 100, 20, 60
BAR = 0.2


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", default=os.path.join(ROOT, "docs"), help="folder of the page and the plot")
    parser.add_argument("--logs", default=os.path.join(ROOT, "build", "overlap"), help="folder for the runs' logs")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--batch", type=int, default=128, help="batch size of a rank")
    parser.add_argument("--worker", metavar="COMMUNICATOR", help=argparse.SUPPRESS)
    parser.add_argument("--log-file", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        return work(args)
    for folder in (args.logs, args.out):
        os.makedirs(folder, exist_ok=True)
    runs = {}
    for launcher, flag in LAUNCHERS.items():
        for communicator in COMMUNICATORS:
            log = os.path.join(args.logs, f"{communicator}{flag}")
            finish(
                f"{communicator}, {launcher}",
                [
                    "horovodrun",
                    flag,
                    "-np",
                    str(args.ranks),
                    "--start-timeout",
                    "120",
                    sys.executable,
                    __file__,
                    "--ranks",
                    str(args.ranks),
                    "--batch",
                    str(args.batch),
                    "--worker",
                    communicator,
                    "--log-file",
                    log,
                ],
                600,
                SHARED_CORES,
            )
            runs[communicator, launcher] = Run(log, args.ranks)
    drawn = next(iter(LAUNCHERS.values()))
    draw(
        next(iter(runs.values())),
        os.path.join(args.logs, f"{COMMUNICATORS[0]}{drawn}.trace.json"),
        os.path.join(args.out, "overlap.png"),
    )
    text = document(runs, args)
    write_section(args.out, "overlap", "Overlap of codecs and backward", text)
    print(text)
    return 0 if all(run.share("exposed") <= BAR for run in runs.values()) else 1


class Run:
    """A finished run. ranks: for each rank, what it measured in each step."""

    def __init__(self, log: str, ranks: int):
        self.ranks = []
        for rank in range(ranks):
            with open(f"{log}.{rank}.json") as file:
                self.ranks.append(json.load(file))

    def _median(self, of: Callable) -> float:
        """Return the median over all ranks' steps."""
        return statistics.median(of(step) for rank in self.ranks for step in rank[WARM_UP:])

    def median(self, field: str) -> float:
        return self._median(lambda step: step[field])

    def share(self, field: str) -> float:
        """Return the share of the codecs' time."""
        return self._median(lambda step: step[field] / step["codec"])


def work(args) -> int:
    """Run one rank."""
    import horovod.torch as hvd
    import torch
    from tqdm import trange

    from grace_ext.adapters.horovod_torch import DistributedOptimizer
    from grace_ext.observe import Timeline

    hvd.init()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    layers = [
        layer
        for inputs, outputs in zip(WIDTHS, WIDTHS[1:], strict=False)
        for layer in (torch.nn.Linear(inputs, outputs), torch.nn.ReLU())
    ]
    net = torch.nn.Sequential(*layers[:-1])
    trace = Timeline(f"{args.log_file}.trace.json", steps=[DRAWN]) if hvd.rank() == 0 else None
    optimizer = DistributedOptimizer(
        torch.optim.SGD(net.parameters(), 0.01),
        net.named_parameters(),
        observe=trace,
        communicator=args.worker,
        bucket_bytes=BUCKET_BYTES,
    )
    hvd.broadcast_parameters(net.state_dict(), root_rank=0)
    torch.manual_seed(hvd.rank())
    x, y = torch.randn(args.batch, WIDTHS[0]), torch.randint(0, WIDTHS[-1], (args.batch,))
    entries = []
    for _ in trange(STEPS, disable=hvd.rank() > 0):
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(net(x), y)
        started, at = time.perf_counter(), time.time()
        loss.backward()
        backward = time.perf_counter() - started
        optimizer.step()
        last = optimizer.compression_stats()["last_step"]
        codec = sum(taken for stage, taken in last["seconds"].items() if stage != "exchange")
        entries.append(
            {
                "backward": backward,
                "backward_at": at,
                "codec": codec,
                "late": last["late_seconds"],
                "exposed": last["exposed_seconds"],
            }
        )
    with open(f"{args.log_file}.{hvd.rank()}.json", "w") as file:
        json.dump(entries, file)
    return 0


def document(runs: dict[tuple[str, str], Run], args) -> str:
    table = [["communicator", "launcher", "backward", "codecs", "late", "exposed", "share late", "share exposed"]]
    for (communicator, launcher), run in runs.items():
        times = (f"{1e3 * run.median(field):.1f} ms" for field in ("backward", "codec", "late", "exposed"))
        shares = (f"{run.share(field):.0%}" for field in ("late", "exposed"))
        table.append([f"`{communicator}`", f"`{launcher}`", *times, *shares])
    missed, late = (
        " and ".join(
            f"`{communicator}` under `{launcher}`"
            for (communicator, launcher), run in runs.items()
            if run.share(field) > BAR
        )
        for field in ("exposed", "late")
    )
    options = "".join(
        f" --{name} {getattr(args, name)}" for name, usual in (("ranks", 2), ("batch", 128)) if getattr(args, name) != usual
    )
    parameters = sum((inputs + 1) * outputs for inputs, outputs in zip(WIDTHS, WIDTHS[1:], strict=False))
    return (
        "\n\n".join(
            [
                f"A network of {len(WIDTHS) - 1} layers and {parameters / 1e6:.1f} million parameters in buckets of "
                f"{BUCKET_BYTES // 2**20} MiB, with the default spec and {args.ranks} ranks. A worker thread encodes each "
                "bucket as soon as its gradients are complete, and in between decodes what has arrived from the other "
                "ranks. After the end of backward, the step itself encodes the buckets that the worker has not started. "
                "*Late* is the encoding and decoding that remains then, and the time spent waiting for the worker. The "
                "exchange hides a part of it: decoding a bucket does not make the step longer while another bucket, which "
                "still has to be decoded, is in flight. The rest is *exposed*. Encoding is always exposed; with "
                "`sharded`, so is the encoding of sums, for which other ranks wait.",
                as_markdown(table).replace("|---|--:|--:|", "|---|---|--:|"),
                "![one step: backward, and the phases of each bucket](overlap.png)",
                f"- The target, set before measuring: where backward takes longer than the codecs, at most {BAR:.0%} of "
                "the codecs' time is "
                f"exposed. It is {f'**missed** by {missed}' if missed else 'met'}. If all late time counted, it would be "
                f"{f'missed by {late}' if late else 'met, too'}.\n"
                "- Under Open MPI, Horovod's thread never sleeps while it waits for another rank. If the ranks keep all "
                "cores busy, this thread loses its turns to backward, and collectives take longer. Gloo's threads sleep.",
                f"Medians of {STEPS - WARM_UP} steps, measured on {datetime.date.today().isoformat()} on {machine()}, by "
                f"`python benchmarks/overlap.py{options}`.",
            ]
        )
        + "\n"
    )


def draw(run: Run, trace: str, file: str) -> None:
    """Plot the traced step: each row is a bucket, in the order in which they are sent."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    with open(trace) as file_of_events:
        events = json.load(file_of_events)
    origin = events[0]["args"]["start_time_since_epoch_in_micros"]
    names = {event["pid"]: event["args"]["name"] for event in events if event.get("name") == "process_name" and event["pid"]}
    phases = [event for event in events if event.get("name") in ("encode", "exchange", "decode") and "ts" in event]
    entry = run.ranks[0][DRAWN]
    start = 1e6 * entry["backward_at"] - origin
    rows = sorted(names, key=lambda pid: min((event["ts"] for event in phases if event["pid"] == pid), default=0))
    figure, ax = plt.subplots(figsize=(8, 4.2), layout="constrained")
    ax.broken_barh([(0, 1e3 * entry["backward"])], (-0.4, 0.8), color="0.75", label="backward")
    for kind, colour in (("encode", "tab:blue"), ("exchange", "tab:orange"), ("decode", "tab:green")):
        for number, pid in enumerate(rows, start=1):
            bars = [
                ((event["ts"] - start) / 1e3, event["dur"] / 1e3)
                for event in phases
                if event["pid"] == pid and event["name"] == kind
            ]
            label = {"exchange": "waiting for others"}.get(kind, kind) if number == 1 else None
            ax.broken_barh(bars, (number - 0.4, 0.8), color=colour, label=label)
    ax.set(
        xlabel="milliseconds since backward began",
        yticks=range(len(rows) + 1),
        yticklabels=["backward", *(names[pid].rsplit(".", 1)[-1] for pid in rows)],
        title="One step on rank 0",
    )
    ax.invert_yaxis()
    figure.legend(loc="outside lower center", ncols=4, frameon=False)
    figure.savefig(file, dpi=150)
    plt.close(figure)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except RunFailed as error:
        sys.exit(f"[overlap] error: {error}")
