"""Bytes and time of a step against the number of workers, by communicator: measured, and simulated up to 1,024 workers.

    python benchmarks/scaling.py

Writes the section "Scaling" of docs/benchmarks.md and docs/scaling.png. Needs root, for hosts on this machine
(mpirun/hosts), each of which has the same share of a core in all jobs, so that the number of hosts changes nothing else. Takes
80 minutes; after a break, --resume goes on.
"""

import argparse
import dataclasses
import glob
import json
import math
import os
import signal
import statistics
import sys
import time
from typing import NamedTuple

import numpy as np
from _hosts import Hosts, Job, JobFailed, wait_until
from _lib import ROOT
from _page import write_section
from _scaling_page import FITTED, LIBRARIES, PROBED, document, plot

from grace_ext import compressor
from grace_ext.policy import codec_timing, cost_model

WORKER = os.path.join(ROOT, "benchmarks", "_scaling_worker.py")
TOPK = "topk:0.01/rice/qsgd:7"


@dataclasses.dataclass(frozen=True)
class Method:
    """communicator: None for the library's own allreduce. library: whose collectives, "Horovod" or "torch"."""

    spec: str
    communicator: str | None
    memory: str = "residual"
    per_host: int = 1
    library: str = "Horovod"


METHODS = {
    "Horovod fp16": Method("dense/fp16", None, "none"),
    "allreduce, fp16": Method("dense/fp16", "allreduce", "none"),
    "allgather": Method(TOPK, "allgather"),
    "sharded": Method(TOPK, "sharded"),
    "tree": Method(TOPK, "tree"),
    "hierarchical, 2 ranks a host": Method(TOPK, "hierarchical", per_host=2),
    "DDP fp16": Method("dense/fp16", None, "none", library="torch"),
    "allgather over DDP": Method(TOPK, "allgather", library="torch"),
}
LAYOUTS = sorted({method.per_host for method in METHODS.values()})  # ranks on a host
SPARE = 0.2  # of all cores, for the kernel and what else runs
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
    """The measurements of a method, by numbers of ranks and hosts.

    Seconds of a step and of its collectives, without waiting for other ranks' codecs; bytes of a step, means over ranks:
    handed to collectives, and sent by the interface; bytes per second that are sent while idle.
    """

    ranks: int
    hosts: int
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
    return Point(len(own), len(own) // METHODS[label].per_host, seconds, float(np.median(wire)), payload, sent, coordination)


class Rest(NamedTuple):
    """Seconds of a step beside codecs and collectives.

    waiting: of waiting for the slowest of all ranks, times log2(ranks), in the place of α · rounds; None with whole cores.
    """

    base: float = 0.0
    waiting: float | None = None


class Model:
    """Predicts at one rate.

    codecs: by label, with a core to themselves. links: by library, by collective. share: of a core, of each rank.
    """

    def __init__(
        self, elements: int, codecs: dict[str, cost_model.Codec], links: dict[str, dict[str, cost_model.Link]], share=1.0
    ):
        self.links, self.rest = links, dict.fromkeys(METHODS, Rest())
        self._elements, self._codecs, self._share = elements, codecs, share

    def step(self, label: str, ranks: int) -> list:
        method = METHODS[label]
        hosts = [rank // method.per_host for rank in range(ranks)]
        return cost_model.step_of(method.communicator or "allreduce", ranks, self._elements, self._codecs[label], hosts)

    def wire(self, label, ranks) -> float:
        return cost_model.wire_seconds(self.step(label, ranks), self.links[METHODS[label].library])

    def codec(self, label, ranks) -> float:
        return cost_model.codec_seconds(self.step(label, ranks)) / self._share

    def seconds(self, label, ranks) -> float:
        rest, codec = self.rest[label], self.codec(label, ranks)
        if rest.waiting is None:
            return self.wire(label, ranks) + codec + rest.base
        return self._transfer(label, ranks) + codec + rest.base + rest.waiting * math.log2(ranks)

    def _transfer(self, label, ranks) -> float:
        """Seconds of the collectives without α · rounds."""
        links = {
            name: cost_model.Link(link.setup, 0.0, link.beta) for name, link in self.links[METHODS[label].library].items()
        }
        return cost_model.wire_seconds(self.step(label, ranks), links)

    def sent(self, label, ranks) -> float:
        return float(cost_model.bytes_of(self.step(label, ranks), "sent").mean())

    def fit_rest(self, points: dict[str, dict[int, Point]], waiting: bool) -> None:
        """Fit the rest to steps on FITTED hosts, with the least squares of relative errors. waiting: whether ranks wait for shares."""
        for label, found in points.items():
            few = [point for point in found.values() if point.hosts in FITTED]
            if not few:
                continue
            self.rest[label] = Rest(waiting=0.0 if waiting else None)
            beside = np.array([point.seconds - self.seconds(label, point.ranks) for point in few])
            weights = 1 / np.array([point.seconds for point in few])
            columns = [np.ones(len(few)), *([np.log2([point.ranks for point in few])] if waiting else [])]
            self.rest[label] = Rest(
                *np.linalg.lstsq((np.array(columns) * weights).T, beside * weights, rcond=None)[0].tolist()
            )


@dataclasses.dataclass
class Rate:
    """All results of a rate: points by method and ranks, and two models.

    One is of hosts with a share of a core each, as measured, the other of hosts with a whole one.
    """

    name: str
    points: dict[str, dict[int, Point]]
    shared: Model
    own: Model


def points_of(jobs: dict[int, dict[int, list[dict]]]) -> dict[str, dict[int, Point]]:
    """Summarize the jobs, by ranks on a host and ranks."""
    return {
        label: {ranks: point_of(results, label) for ranks, results in jobs[method.per_host].items()}
        for label, method in METHODS.items()
        if jobs.get(method.per_host)
    }


def probes(runs: dict[int, list[dict]], library: str) -> dict[str, list[tuple[int, float, float]]]:
    """Return (rounds, path, seconds) by collective. runs: results of all ranks, by number of ranks."""
    samples = {}
    for ranks, results in runs.items():
        for collective, payload, seconds in results[0]["probes"][library]:
            splits = np.full((ranks, ranks), payload // ranks)
            part = {
                "allreduce": lambda p=payload, n=ranks: cost_model.ring_allreduce(n, p),
                "allgather": lambda p=payload, n=ranks: cost_model.ring_allgather([p] * n),
                "alltoall": lambda s=splits: cost_model.alltoall(s),
            }[collective]()
            samples.setdefault(collective, []).append((part.rounds, part.path, seconds))
    return samples


def fit_shared(runs: dict[int, list[dict]]) -> dict[str, dict[str, cost_model.Link]]:
    """Fit the links of hosts with a share of a core. runs: results of all ranks, by number of ranks."""
    few = {ranks: results for ranks, results in runs.items() if ranks in PROBED}
    return {
        library: {collective: cost_model.fit(samples) for collective, samples in probes(few, library).items()}
        for library in LIBRARIES
    }


def fit_own(two: list[dict]) -> dict[str, dict[str, cost_model.Link]]:
    """Fit the links of two ranks, each of which has a core.

    alpha is a message's own time, measured without either library, because the probes of two ranks cannot separate it from the
    rest. beta is that of the link, so the minimum of any collective.
    """
    alpha = two[0]["message"]
    fitted = {
        (library, collective): cost_model.fit(
            [(0, path, max(seconds - alpha * rounds, 0.1 * seconds)) for rounds, path, seconds in samples]
        )
        for library in LIBRARIES
        for collective, samples in probes({2: two}, library).items()
    }
    beta = min(link.beta for link in fitted.values())
    return {
        library: {
            collective: cost_model.Link(link.setup, alpha, beta)
            for (of, collective), link in fitted.items()
            if of == library
        }
        for library in LIBRARIES
    }


def measure_codecs(elements: int) -> dict[str, cost_model.Codec]:
    """Measure the codecs in this process alone, on one thread."""
    gradients = [gradient_of(elements, rank, 0) for rank in range(SOURCES)]
    topk = codec_timing.measure_codec(compressor(TOPK), gradients)
    return {
        "allreduce, fp16": codec_timing.measure_reducible_codec(compressor("dense/fp16"), gradients[0]),
        **dict.fromkeys(("Horovod fp16", "DDP fp16"), measure_casts(gradients[0])),
        **{label: topk for label, method in METHODS.items() if method.spec == TOPK},
    }


def measure_casts(gradient: np.ndarray, times=9) -> cost_model.Codec:
    """Measure what the libraries' fp16 does in addition to an allreduce."""
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


def run(up: Hosts, rate: str, ranks: int, per_host: int, share: float | None, args) -> list[dict]:
    """Return the results of all ranks of a job, or those that an earlier job left. share: of a core, of each rank. Raises JobFailed."""
    out = os.path.join(args.logs, f"{rate}-{ranks}-{per_host}{'' if share else '-whole'}.json")
    if not (args.resume and os.path.exists(out)):
        print(f"{rate}, {ranks} ranks, {per_host} on a host, {share or 1:g} of a core each", file=sys.stderr, flush=True)
        _start(up, ranks, per_host, share, out, args)
    with open(out) as file:
        return json.load(file)


def _start(up: Hosts, ranks: int, per_host: int, share: float | None, out: str, args) -> None:
    options = {
        "out": out,
        "elements": args.elements,
        "steps": args.steps,
        "seconds": args.seconds,
        "methods": [label for label, method in METHODS.items() if method.per_host == per_host],
        "probes": per_host == 1 and ranks in PROBED,  # no others are used
    }
    # All that a processor does takes longer by 1 / share, and so does a cycle of Horovod's coordination.
    env = {"HOROVOD_CYCLE_TIME": f"{1 / share:g}"} if share else None
    for attempt in (1, 2):  # mpirun occasionally hangs (docs/cluster.md)
        for old in glob.glob(f"{out}.*"):
            os.remove(old)
        try:
            job = Job(up, args.launcher, ranks, [WORKER, json.dumps(options)], env, per_host)
            wait_until(lambda job=job: len(glob.glob(f"{out}.ready.*")) == ranks or job.has_ended(), args.timeout)
            if share:
                up("cores", f"{share * per_host:g}")
            open(f"{out}.go", "w").close()
            job.end(args.timeout)
            return
        except JobFailed:
            if attempt == 2:
                raise
        finally:
            up("cores", "none")
            for old in glob.glob(f"{out}.*"):
                os.remove(old)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", default=os.path.join(ROOT, "docs"), help="folder of benchmarks.md and the plot")
    parser.add_argument("--logs", default=os.path.join(ROOT, "build", "scaling"), help="folder for the ranks' results")
    parser.add_argument("--resume", action="store_true", help="do not repeat the jobs that have left results there")
    parser.add_argument("--rates", nargs="+", default=["100mbit", "1gbit"])
    parser.add_argument("--ranks", nargs="+", type=int, default=[2, 4, 6, 8, 12, 16])
    parser.add_argument("--share", type=float, help="of a core, of each rank; default: what all cores give the most ranks")
    parser.add_argument("--elements", type=int, default=4_000_000, help="float32 elements of the gradient")
    parser.add_argument("--steps", type=int, default=20, help="measured steps of each method")
    parser.add_argument("--seconds", type=float, default=6.0, help="seconds after which a slow method takes fewer steps")
    parser.add_argument("--launcher", default="horovodrun --gloo")
    parser.add_argument("--name", default="scaling", help="name of the set of hosts")
    parser.add_argument("--timeout", type=float, default=600, help="seconds after which a job is stopped")
    args = parser.parse_args()
    args.logs = os.path.abspath(args.logs)
    os.makedirs(args.logs, exist_ok=True)
    args.share = args.share or (1 - SPARE) * len(os.sched_getaffinity(0)) / max(args.ranks)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that the hosts are removed
    started = time.perf_counter()
    print("codecs", file=sys.stderr, flush=True)
    codecs, rates = measure_codecs(args.elements), []
    with Hosts(args.name, max(args.ranks), args.rates[0]) as up:
        for rate in args.rates:
            up("rate", rate)
            jobs = {
                per_host: {
                    ranks: run(up, rate, ranks, per_host, args.share, args)
                    for ranks in args.ranks
                    if ranks % per_host == 0 and (per_host == 1 or ranks > per_host)
                }
                for per_host in LAYOUTS
            }
            whole = {1: {2: run(up, rate, 2, 1, None, args)}}
            found = Rate(
                rate,
                points_of(jobs),
                Model(args.elements, codecs, fit_shared(jobs[1]), args.share),
                Model(args.elements, codecs, fit_own(whole[1][2])),
            )
            found.shared.fit_rest(found.points, waiting=True)
            found.own.fit_rest(points_of(whole), waiting=False)
            rates.append(found)
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
