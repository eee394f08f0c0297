"""The accuracy map of benchmarks/transformer.py: the parts of specs, each with its options, on one task.

Its ranks are in one process, one after the other: the same compressors, memory and communicator, and the model once, since all
ranks have the same parameters.
"""

import functools
import multiprocessing
import os
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from _transformer_tasks import MAP, TASKS, learning_rate

from grace_ext.adapters._torch.gradients import pack
from grace_ext.communicators.base import wait
from grace_ext.exchange.bucketing import build_buckets
from grace_ext.exchange.buckets import Tensor
from grace_ext.exchange.engine import Exchange
from grace_ext.pipeline.presets import PRESETS
from grace_ext.pipeline.spec import parse_stage
from grace_ext.policy.rules import Rules
from grace_ext.registry import names
from grace_ext.rng import Stream
from grace_ext.transport import InProcessGroup

DENSITIES = (0.1, 0.01, 0.001)
FALSE_POSITIVES = (0.1, 0.01, 0.001)
POLICIES = ("p0", "p1", "p2")
SPARSIFIERS = (
    "topk:{density:g}",
    "topk:{density:g}:per=tensor",
    "dgc:{density:g}",
    "randomk:{density:g}",
    "adaq:{density:g}",
)
THRESHOLDS = (1e-4, 1e-3, 1e-2)
EVALUATIONS = 6
NOTHING = "dense/raw"  # without compression


def specs() -> dict[str, str]:
    """List the specs by what the map calls them. All go with the memory `residual`."""
    quantizers = [name for name in names("value") if name != "raw"]
    found = [NOTHING, *(f"{one.format(density=density)}/auto/raw" for one in SPARSIFIERS for density in DENSITIES)]
    found += [f"threshold:{value:g}/auto/raw" for value in THRESHOLDS]
    found += [f"topk:{density:g}/auto/{value}" for value in quantizers for density in DENSITIES]
    blooms = [
        f"topk:{density:g}/bloom:{policy}:fpr={fpr:g}/raw"
        for fpr in FALSE_POSITIVES
        for policy in POLICIES
        for density in DENSITIES
    ]
    found += [*blooms, *(f"dense/{value}" for value in quantizers)]
    return {**{f"preset {name}": name for name in PRESETS}, **{spec: spec for spec in found}}


def file_name(label: str) -> str:
    """Return the label as a part of the name of a result's file."""
    return "".join(c if c.isalnum() or c in ".=" else "-" for c in label)


class Ranks:
    """The ranks of a training, each with an exchange of its own.

    Args:
        model: The model that all of them have.
        spec: The spec of its matrices.
        ranks: Number of ranks.
        seed: Seed of the compressors.
    """

    def __init__(self, model: torch.nn.Module, spec: str, ranks: int, seed: int):
        self._parameters, self._seed = dict(model.named_parameters()), seed
        group, communicator = InProcessGroup(ranks), parse_stage("communicator", "allgather")
        tensors = [Tensor(name, p.numel(), p.ndim, shape=tuple(p.shape)) for name, p in self._parameters.items()]
        self._exchanges = [Exchange(group.transport(rank), "residual", 1 / ranks, seed) for rank in range(ranks)]
        for exchange in self._exchanges:
            exchange.set_buckets(build_buckets(exchange, [tensors], (), Rules(spec, seed=seed), communicator, "map"))
        self._pending: list[list] = []
        self.bytes_sent = 0  # of rank 0

    def start(self, step: int) -> None:
        """Encode and send what is in the parameters' gradients, as the next rank."""
        rank = len(self._pending)
        exchange, found = self._exchanges[rank], []
        for bucket in exchange.buckets:
            gradients = [self._parameters[tensor.name].grad for tensor in bucket.tensors]
            stream = Stream(self._seed, bucket.name, step, rank)
            found.append(bucket.start(exchange.transport, functools.partial(pack, bucket, gradients, 1.0), stream))
        self._pending.append(found)

    def finish(self) -> bool:
        """Write the mean of all ranks to the parameters' gradients, and tell whether it is finite."""
        first, ranks = self._exchanges[0], len(self._exchanges)
        finite = True
        for bucket, pending in zip(first.buckets, self._pending[0], strict=True):
            out = np.empty(bucket.size, np.float32)
            finite &= bucket.finish(pending, first.transport, out, 1 / ranks)
            self.bytes_sent += pending.wire_bytes
            parts = np.split(out, np.cumsum(bucket.sizes)[:-1])
            for tensor, part in zip(bucket.tensors, parts, strict=True):
                self._parameters[tensor.name].grad = torch.from_numpy(part).view(tensor.shape)
        for exchange, found in zip(self._exchanges, self._pending, strict=True):
            for pending in found if exchange is not first else ():
                wait(pending)  # what it would decode is what rank 0 has decoded
            (exchange.state.commit if finite else exchange.state.rollback)()
        self._pending.clear()
        return finite


def train(label: str, spec: str, seed: int, steps: int, ranks: int, folder: str) -> dict:
    """Train once, and return the result as benchmarks/_transformer_worker.py writes it, with its options."""
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    task = TASKS[MAP]
    data, model = task.data(folder), task.model()
    (optimizer,) = task.optimizers(model, task.lr, task.betas)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: learning_rate(step, steps))
    generators = [torch.Generator().manual_seed(1000 * seed + rank) for rank in range(ranks)]
    exchange, evaluated = Ranks(model, spec, ranks, seed), {round(steps * (i + 1) / EVALUATIONS) for i in range(EVALUATIONS)}
    curve, started, skipped = [], time.perf_counter(), 0
    for step in range(1, steps + 1):
        for generator in generators:
            optimizer.zero_grad()
            data.loss(model, data.batch(generator, task.batch)).backward()
            exchange.start(step)
        if exchange.finish():
            optimizer.step()
        else:
            skipped += 1
        schedule.step()
        if step in evaluated:
            loss, right, count = data.evaluate(model, 0, 1)
            found = {"loss": loss / count, "accuracy": right / count, "seconds": time.perf_counter() - started}
            curve.append({"step": step, "bytes_sent": exchange.bytes_sent, **found})
    return {
        "label": label,
        "task": MAP,
        "seed": seed,
        "steps": steps,
        "batch": task.batch,
        "lr": task.lr,
        "library": "grace_ext",
        "arguments": {"compression": spec, "memory": "residual"},
        "ranks": ranks,
        "curve": curve,
        "skipped": skipped,
        "parameters": sum(p.numel() for p in model.parameters()),
        "minutes": (time.perf_counter() - started) / 60,
    }


def train_all(wanted: dict[str, str], seed: int, steps: int, ranks: int, folder: str) -> Iterator[tuple[str, dict]]:
    """Train with each of the specs, one process for each core; yields labels and results as they come."""
    work = functools.partial(_train_one, seed=seed, steps=steps, ranks=ranks, folder=folder)
    # Not concurrent.futures, whose max_tasks_per_child lets Python 3.11 wait for ever (python/cpython#115634).
    with multiprocessing.get_context("spawn").Pool(len(os.sched_getaffinity(0)), maxtasksperchild=16) as pool:
        yield from pool.imap_unordered(work, wanted.items())


def _train_one(wanted: tuple[str, str], **arguments: Any) -> tuple[str, dict]:
    return wanted[0], train(*wanted, **arguments)
