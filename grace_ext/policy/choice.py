"""Chooses each bucket's way for `communicator="auto"`: from a model of this run's links and codecs, then by trial.

A schedule of steps, the same on all ranks: some compressed steps, which show how long the codecs take and how much they
send; a fit of the link; then a few steps of each plan that the model does not rule out, and the fastest of them stays.
After 200, 2000, ... steps it starts again, and whenever steps have become much slower than those that led to the choice.
"""

import logging
import statistics
import time

import numpy as np

from ..communicators.auto import Switch
from ..communicators.base import Transport
from ..links import Line, agreed, fit, probe, sent_by_a_rank

_LOG = logging.getLogger("grace_ext")
_FIRST = 4  # compressed steps, of which the last two count: kernels compile in the first, buckets change after it
_TRIAL = 6  # steps of a trial, of which the first does not count
_AGAIN = 200  # steps until the first new look; ten times as many until the next
_CHECK = 50  # steps between two looks at how long they take
_SLOWER = 1.5


def predict(ways: list[dict[str, tuple]], links: dict[str, Line], ranks: int) -> list[dict[str, float]]:
    """Seconds of each bucket by each of its ways. ways: name -> (collectives, payload bytes, seconds of the codecs)."""
    return [{name: codec + sum(links[one].seconds(sent_by_a_rank(one, ranks, payload)) for one in collectives)
             for name, (collectives, payload, codec) in bucket.items()} for bucket in ways]


def plans(predicted: list[dict[str, float]], slack: float) -> list[tuple[str, ...]]:
    """Ways, one a bucket, that are worth a trial, without repetition: the model's best for each bucket, and each way for all
    buckets; those left out are predicted to take `slack` seconds more than the best."""
    best = tuple(min(bucket, key=bucket.get) for bucket in predicted)
    found = [best, *((way,) * len(predicted) for way in predicted[0])]

    def seconds(plan):
        return sum(bucket[way] for bucket, way in zip(predicted, plan, strict=True))

    return list(dict.fromkeys(plan for plan in found if seconds(plan) <= seconds(best) + slack))


class Chooser:
    """Of an exchange's buckets that have a Switch. The calls are the same on all ranks, since step numbers are."""

    def __init__(self, transport: Transport, buckets: list):
        self._transport, self._buckets = transport, buckets
        self._name = f"{buckets[0].name}.choice"
        self._ended_at: float | None = None
        self._seconds: list[float] = []  # of the steps of the phase
        self._codecs: dict[str, list[tuple[float, float]]] = {bucket.name: [] for bucket in buckets}
        self._trials: list[tuple[str, ...]] = []
        self._results: list[tuple[float, tuple[str, ...]]] = []
        self._wait = _AGAIN
        self._start()

    def _start(self) -> None:
        self._take((Switch.COMPRESSED,) * len(self._buckets))
        self._left, self._next = _FIRST, self._model
        self._results = []

    @property
    def plan(self) -> tuple[str, ...]:
        return tuple(bucket.communicator.way for bucket in self._buckets)

    def _take(self, plan: tuple[str, ...]) -> None:
        for bucket, way in zip(self._buckets, plan, strict=True):
            bucket.communicator.take(way)
        self._seconds.clear()

    def add(self, bucket, pending) -> None:
        """A bucket that is finished."""
        if bucket.name in self._codecs and bucket.communicator.way == Switch.COMPRESSED:
            codec = sum(taken for stage, taken in pending.seconds.items() if stage != "exchange")
            self._codecs[bucket.name].append((pending.wire_bytes, codec))

    def end_step(self, finite: bool) -> None:
        """When nothing is under way."""
        now = time.perf_counter()
        if self._ended_at is not None:
            self._seconds.append(now - self._ended_at)
        for bucket in self._buckets:
            bucket.communicator.end_step(finite)
        self._left -= 1
        if self._left <= 0:
            self._next()
            now = time.perf_counter()  # what choosing took is not the next step's
        self._ended_at = now

    def _model(self) -> None:
        """The compressed steps are over."""
        links = {one: fit(probe(self._transport, self._name, one)) for one in ("allreduce", "allgather")}
        measured = [np.median(seen[-2:], axis=0) for seen in self._codecs.values()]
        step = statistics.median(self._seconds[-2:])
        joined = agreed(self._transport, self._name, np.array([*np.ravel(measured), step])).mean(axis=0)
        ways = [{Switch.COMPRESSED: (bucket.communicator.collectives, *seen),
                 **{way: (("allreduce",), bucket.communicator.payload(way, bucket.size), 0.0)
                    for way in bucket.communicator.ways if way != Switch.COMPRESSED}}
                for bucket, seen in zip(self._buckets, joined[:-1].reshape(-1, 2), strict=True)]
        for seen in self._codecs.values():
            seen.clear()
        self._trials = plans(predict(ways, links, self._transport.size), slack=joined[-1])
        self._try()

    def _try(self) -> None:
        """The next trial, or the choice."""
        if self._trials:
            self._take(self._trials.pop(0))
            self._left, self._next = _TRIAL, self._tried
            return
        means = agreed(self._transport, self._name, np.array([seconds for seconds, _ in self._results])).mean(axis=0)
        chosen = int(np.argmin(means))
        self._expected = float(means[chosen])
        self._take(self._results[chosen][1])
        if self._transport.rank == 0:
            _LOG.info("auto: %s", "; ".join(f"{1e3 * seconds:.3g} ms a step with {_described(plan)}" for seconds, (_, plan)
                                            in sorted(zip(means, self._results, strict=True), key=lambda one: one[0])))
        self._steps, self._left, self._next = 0, _CHECK, self._look

    def _tried(self) -> None:
        self._results.append((statistics.median(self._seconds[1:]), self.plan))
        self._try()

    def _look(self) -> None:
        """Is the choice still good?"""
        self._steps += _CHECK
        taken = float(agreed(self._transport, self._name, np.array([statistics.median(self._seconds)])).mean())
        self._seconds.clear()
        if self._steps >= self._wait or taken > _SLOWER * self._expected:
            self._wait *= 10 if self._steps >= self._wait else 1
            self._start()
            return
        self._left = _CHECK


def _described(plan: tuple[str, ...]) -> str:
    return " and ".join(f"{plan.count(way)} {way}" for way in dict.fromkeys(plan))
