"""Bytes and time of a step against the number of workers, by communicator: measured, and simulated up to 1,024 workers.

    python benchmarks/scaling.py

Writes the section "Scaling" of docs/benchmarks.md and docs/scaling.png. Needs root, for hosts on this machine
(mpirun/hosts). Takes about 10 minutes.
"""

import argparse
import dataclasses
import json
import os
import signal
import statistics
import sys
import time

import numpy as np
from _hosts import Hosts, Job, JobFailed
from _lib import ROOT
from _page import write_section
from _scaling_page import FITTED, document, plot

from grace_ext import compressor
from grace_ext.policy import codec_timing, cost_model

WORKER = os.path.join(ROOT, "benchmarks", "_scaling_worker.py")
TOPK = "topk:0.01/rice/qsgd:7"
#: label -> spec, communicator (None: Horovod's own allreduce), memory, ranks on a host
METHODS = {
    "Horovod fp16": ("dense/fp16", None, "none", 1),
    "allreduce, fp16": ("dense/fp16", "allreduce", "none", 1),
    "allgather": (TOPK, "allgather", "residual", 1),
    "sharded": (TOPK, "sharded", "residual", 1),
    "tree": (TOPK, "tree", "residual", 1),
    "hierarchical, 2 ranks a host": (TOPK, "hierarchical", "residual", 2),
}
LAYOUTS = sorted({per_host for *_, per_host in METHODS.values()})  # ranks on a host
CLUSTER = 256  # elements that share a scale
SOURCES = 8  # number of gradients that codecs are measured on


def gradient_of(elements: int, rank: int, step: int) -> np.ndarray:
    """Make a gradient, float32[elements].

    Its scales are common to all ranks and steps, because large elements are not anywhere; half of the variance of its values
    is common to the ranks.
    """
    scales = np.exp(np.random.default_rng(0).standard_normal(-(-elements // CLUSTER), np.float32))
    values = sum(np.random.default_rng(seed).standard_normal(elements, np.float32) for seed in ([1, step], [2, step, rank]))
    return np.repeat(scales, CLUSTER)[:elements] * values


@dataclasses.dataclass
class Point:
    """The measurements of a method.

    Seconds of a step and of its collectives, without waiting for other ranks' codecs; bytes of a step, means over ranks:
    handed to collectives, and sent by the interface; bytes per second that are sent while idle.
    """

    ranks: int
    seconds: float
    wire: float
    payload: float
    sent: float
    coordination: float


def point_of(results: list[dict], label: str) -> Point:
    """Summarize the results of all ranks."""
    own = [result["methods"][label] for result in results]
    steps = np.array([one["steps"] for one in own]).mean(axis=0)
    wire = np.array([one["apart"] for one in own]).max(axis=0).sum(axis=1)  # of the slowest rank, collective by collective
    seconds = float(np.median(steps))
    payload, sent = (statistics.mean(one[kind] for one in own) for kind in ("payload", "sent"))
    coordination = statistics.mean(result["idle"] for result in results)
    return Point(len(own), seconds, float(np.median(wire)), payload, sent, coordination)


class Model:
    """Predicts at one rate. codecs: by label; links: by collective; cores: of all ranks together."""

    def __init__(self, elements: int, codecs: dict[str, cost_model.Codec], links: dict[str, cost_model.Link], cores: float):
        self.links = links
        self._elements, self._codecs, self._cores = elements, codecs, cores

    def step(self, label: str, ranks: int) -> list:
        _, communicator, _, per_host = METHODS[label]
        hosts = [rank // per_host for rank in range(ranks)]
        return cost_model.step_of(communicator or "allreduce", ranks, self._elements, self._codecs[label], hosts)

    def wire(self, label, ranks) -> float:
        return cost_model.wire_seconds(self.step(label, ranks), self.links)

    def codec(self, label, ranks) -> float:
        return cost_model.codec_seconds(self.step(label, ranks), self._cores)

    def seconds(self, label, ranks) -> float:
        return self.wire(label, ranks) + self.codec(label, ranks)

    def sent(self, label, ranks) -> float:
        return float(cost_model.bytes_of(self.step(label, ranks), "sent").mean())


@dataclasses.dataclass
class Rate:
    """All results of a rate: points by method and ranks, and two models.

    One is of this machine, the other of a machine whose ranks have their own cores.
    """

    name: str
    points: dict[str, dict[int, Point]]
    shared: Model
    own: Model


def cores() -> int:
    return len(os.sched_getaffinity(0))


def probes(runs: dict[int, list[dict]]) -> dict[str, list[tuple[int, float, float]]]:
    """Return (rounds, path, seconds) by collective. runs: results of all ranks, by number of ranks."""
    samples = {}
    for ranks, results in runs.items():
        for collective, payload, seconds in results[0]["probes"]:
            splits = np.full((ranks, ranks), payload // ranks)
            part = {
                "allreduce": lambda p=payload, n=ranks: cost_model.ring_allreduce(n, p),
                "allgather": lambda p=payload, n=ranks: cost_model.ring_allgather([p] * n),
                "alltoall": lambda s=splits: cost_model.alltoall(s),
            }[collective]()
            samples.setdefault(collective, []).append((part.rounds, part.path, seconds))
    return samples


def fit_shared(runs) -> dict[str, cost_model.Link]:
    """Fit the links of this machine, on whose cores ranks take turns.

    What that adds to a collective grows with the ranks, as its rounds do, and is part of alpha.
    """
    return {collective: cost_model.fit(samples) for collective, samples in probes(runs).items()}


def fit_own(two: list[dict]) -> dict[str, cost_model.Link]:
    """Fit the links of two ranks, each of which has a core.

    alpha is a message's own time, measured without Horovod, because the probes of two ranks cannot separate it from the
    rest. beta is that of the link, so the minimum of any collective.
    """
    alpha = two[0]["message"]
    fitted = {
        collective: cost_model.fit(
            [(0, path, max(seconds - alpha * rounds, 0.1 * seconds)) for rounds, path, seconds in samples]
        )
        for collective, samples in probes({2: two}).items()
    }
    beta = min(link.beta for link in fitted.values())
    return {collective: cost_model.Link(link.setup, alpha, beta) for collective, link in fitted.items()}


def measure_codecs(elements: int) -> dict[str, cost_model.Codec]:
    """Measure the codecs in this process alone, on one thread."""
    gradients = [gradient_of(elements, rank, 0) for rank in range(SOURCES)]
    topk = codec_timing.measure_codec(compressor(TOPK), gradients)
    return {
        "Horovod fp16": measure_casts(gradients[0]),
        "allreduce, fp16": codec_timing.measure_reducible_codec(compressor("dense/fp16"), gradients[0]),
        **{label: topk for label, (spec, *_) in METHODS.items() if spec == TOPK},
    }


def measure_casts(gradient: np.ndarray, times=9) -> cost_model.Codec:
    """Measure what Horovod's fp16 does in addition to its allreduce."""
    import torch

    torch.set_num_threads(1)
    tensor, taken = torch.from_numpy(gradient), []
    for _ in range(times):
        started = time.thread_time()
        half = tensor.half()
        cast = time.thread_time()
        half.float()
        taken.append((cast - started, time.thread_time() - cast))
    there, back = map(statistics.median, zip(*taken, strict=True))
    return cost_model.Codec(lambda elements, summed: 2 * elements, lambda elements: there, lambda elements, containers: back)


def run(up: Hosts, rate: str, ranks: int, per_host: int, args) -> list[dict]:
    """Return the results of all ranks of a job, or those that an earlier job left. Raises JobFailed."""
    out = os.path.join(args.logs, f"{rate}-{ranks}-{per_host}.json")
    if not (args.resume and os.path.exists(out)):
        print(f"{rate}, {ranks} ranks, {per_host} on a host", file=sys.stderr, flush=True)
        _start(up, ranks, per_host, out, args)
    with open(out) as file:
        return json.load(file)


def _start(up: Hosts, ranks: int, per_host: int, out: str, args) -> None:
    options = {
        "out": out,
        "elements": args.elements,
        "steps": args.steps,
        "seconds": args.seconds,
        "methods": [label for label, (*_, on_host) in METHODS.items() if on_host == per_host],
    }
    for attempt in (1, 2):  # mpirun occasionally hangs (docs/cluster.md)
        try:
            Job(up, args.launcher, ranks, [WORKER, json.dumps(options)], per_host=per_host).end(args.timeout)
            return
        except JobFailed:
            if attempt == 2:
                raise


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", default=os.path.join(ROOT, "docs"), help="folder of benchmarks.md and the plot")
    parser.add_argument("--logs", default=os.path.join(ROOT, "build", "scaling"), help="folder for the ranks' results")
    parser.add_argument("--resume", action="store_true", help="do not repeat the jobs that have left results there")
    parser.add_argument("--rates", nargs="+", default=["100mbit", "1gbit"])
    parser.add_argument("--ranks", nargs="+", type=int, default=[2, 3, 4, 6, 8])
    parser.add_argument("--elements", type=int, default=4_000_000, help="float32 elements of the gradient")
    parser.add_argument("--steps", type=int, default=20, help="measured steps of each method")
    parser.add_argument("--seconds", type=float, default=6.0, help="seconds after which a slow method takes fewer steps")
    parser.add_argument("--launcher", default="horovodrun --gloo")
    parser.add_argument("--name", default="scaling", help="name of the set of hosts")
    parser.add_argument("--timeout", type=float, default=600, help="seconds after which a job is stopped")
    args = parser.parse_args()
    args.logs = os.path.abspath(args.logs)
    os.makedirs(args.logs, exist_ok=True)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that the hosts are removed
    started = time.perf_counter()
    print("codecs", file=sys.stderr, flush=True)
    codecs, rates = measure_codecs(args.elements), []
    with Hosts(args.name, max(args.ranks), args.rates[0]) as up:
        for rate in args.rates:
            up("rate", rate)
            jobs = {
                per_host: {
                    ranks: run(up, rate, ranks, per_host, args)
                    for ranks in args.ranks
                    if ranks % per_host == 0 and (per_host == 1 or ranks > per_host)
                }
                for per_host in LAYOUTS
            }
            runs = jobs[1]
            rates.append(
                Rate(
                    rate,
                    {
                        label: {ranks: point_of(one, label) for ranks, one in jobs[per_host].items()}
                        for label, (*_, per_host) in METHODS.items()
                        if jobs[per_host]
                    },
                    Model(
                        args.elements, codecs, fit_shared({ranks: runs[ranks] for ranks in FITTED if ranks in runs}), cores()
                    ),
                    Model(args.elements, codecs, fit_own(runs[2]), float("inf")),
                )
            )
    text = document(rates, args)
    plot(rates, os.path.join(args.out, "scaling.png"))
    write_section(args.out, "scaling", "Scaling", text)
    print(f"\n{text}\nwritten in {args.out}; all in {(time.perf_counter() - started) / 60:.1f} minutes")
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except JobFailed as error:
        sys.exit(f"[scaling] error: {error}")
