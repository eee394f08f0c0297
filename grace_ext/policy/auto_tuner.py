"""Chooses each bucket's strategy for `communicator="auto"`: from a model of this run's links and codecs, then by trial.

The plan of a run, in steps that are the same on all ranks:

1. Some compressed steps, which show how long the codecs take and how much they send; then a fit of the link.
2. Some steps with each plan that the model does not rule out, twice, the second time in the opposite order, because
   machines get slower and faster.
3. Plans that come close to the fastest are tried again, twice; the more trials there were, the closer they have to come.
4. The fastest plan stays. After 1000, 10000, ... steps everything starts again, and whenever steps have become much slower
   than they were when the choice was new.
"""

import logging
import math
import statistics
import time
from collections.abc import Callable, Sequence

import numpy as np

from ..communicators.auto import DENSE, WITH_FLOAT32, Accompanying
from ..communicators.base import Pending
from ..observe.listener import BucketView, StepListener
from ..transport.base import Transport
from ..transport.link_probe import agreed
from .cost_model import Codec, Link, codec_seconds, fit, step_of, wire_seconds
from .link_probe import probe

_LOG = logging.getLogger("grace_ext")
_FIRST = 4  # compressed steps, of which the last two count: kernels compile in the first, and buckets change after it
_SETTLES = 3  # steps of a trial that do not count: one sends the residual, and collectives are new to the library
_TRIAL, _LONGEST_TRIAL, _SECONDS = 5, 10, 0.5  # steps of a trial that count: least, most, and seconds
_ROUNDS = 6  # of trials, at most
_CLOSE = 0.4  # divided by the round's number: how much slower than the fastest a plan may be to be tried again
_AGAIN = 1000  # steps until everything starts again; then ten times as many
_CHECK = 50  # steps between two checks of how long steps take
_SLOWER = 1.5
_SAME = 1.02  # plans whose times differ by less count as equally fast


def codec_of(elements: int, container: float, seconds: float) -> Codec:
    """Make the cost model's codec of a bucket from one measured container; slices cost their share.

    Args:
        elements: Number of elements of the bucket.
        container: Bytes of its container.
        seconds: Seconds of its codec work in all.

    Returns:
        The codec.
    """
    return Codec(lambda part, _: container * part / elements, lambda part: seconds * part / elements, lambda *_: 0.0)


def seconds_of(strategy: str, elements: int, codec: Codec, links: dict[str, Link], hosts: tuple[int, ...]) -> float:
    """Predict the seconds of one bucket's step.

    Args:
        strategy: A strategy of containers, of factors or of dense values.
        elements: Number of elements of the bucket.
        codec: The bucket's codec.
        links: The link of each kind of collective, by its name.
        hosts: See Transport.hosts.

    Returns:
        Seconds of codec work and collectives, one after the other.
    """
    step = step_of("allreduce" if strategy in DENSE else strategy, len(hosts), elements, codec, hosts)
    return codec_seconds(step) + wire_seconds(step, links)


def plans(predicted: list[dict[str, float]], slack: float) -> list[tuple[str, ...]]:
    """List the plans that are worth a trial. A plan is a strategy for each bucket.

    They are the model's best for each bucket, and each strategy for all buckets that have it.

    Args:
        predicted: Predicted seconds by strategy, for each bucket.
        slack: Plans that are predicted to take more than this many seconds more than the best are left out.

    Returns:
        The plans without repetition, the best first.
    """
    best = tuple(min(bucket, key=bucket.get) for bucket in predicted)
    names = dict.fromkeys(strategy for bucket in predicted for strategy in bucket)
    found = [
        best,
        *(
            tuple(strategy if strategy in bucket else chosen for bucket, chosen in zip(predicted, best, strict=True))
            for strategy in names
        ),
    ]

    def seconds(plan: tuple[str, ...]) -> float:
        return sum(bucket[strategy] for bucket, strategy in zip(predicted, plan, strict=True))

    return list(dict.fromkeys(plan for plan in found if seconds(plan) <= seconds(best) + slack))


class AutoTuner(StepListener):
    """Decides for the buckets that have a SwitchingCommunicator.

    The calls are the same on all ranks, since step numbers are. With one rank, or without such buckets, it does nothing.

    Args:
        transport: The exchange's transport.
    """

    def __init__(self, transport: Transport):
        self._transport, self._between = transport, transport.probe_transport()
        self.buckets_set([])

    def buckets_set(self, buckets: Sequence[BucketView]) -> None:
        #: Buckets whose communicators are SwitchingCommunicators.
        self._buckets: list = (
            [bucket for bucket in buckets if bucket.communicator.is_tuned] if self._transport.size > 1 else []
        )
        self._accompanying: list = [bucket for bucket in buckets if isinstance(bucket.communicator, Accompanying)]
        self._ended_at: float | None = None
        self._seconds: list[float] = []  # of each step since the plan in force began
        self._seen: dict[str, list[tuple[float, float]]] = {bucket.name: [] for bucket in self._buckets}
        self._trials: list[tuple[str, ...]] = []
        self._results: list[tuple[float, tuple[str, ...]]] = []
        self._wait = _AGAIN
        if self._buckets:
            self._name = f"{self._buckets[0].name}.choice"
            self._start()

    def _start(self) -> None:
        self._switch_to(tuple(bucket.communicator.strategies[0] for bucket in self._buckets))
        self._left, self._next = _FIRST, self._model
        self._results = []

    @property
    def plan(self) -> tuple[str, ...]:
        """The strategies in force, one for each bucket."""
        return tuple(bucket.communicator.strategy for bucket in self._buckets)

    def _switch_to(self, plan: tuple[str, ...]) -> None:
        for bucket, strategy in zip(self._buckets, plan, strict=True):
            bucket.communicator.switch_to(strategy)
        for bucket in self._accompanying:
            bucket.communicator.has_company = not WITH_FLOAT32.isdisjoint(plan)
        self._seconds.clear()

    def bucket_finished(self, step: int, bucket: BucketView, pending: Pending) -> None:
        if bucket.name in self._seen and self._next == self._model:
            self._seen[bucket.name].append((pending.wire_bytes, pending.codec_seconds))

    def end_step(self, step: int, finite: bool, report: Callable[[], dict]) -> None:
        if not self._buckets:
            return
        now = time.perf_counter()
        if self._ended_at is not None:
            self._seconds.append(now - self._ended_at)
        for bucket in self._buckets:
            bucket.communicator.end_step(finite)
        self._left -= 1
        if self._left <= 0:
            self._next()
            now = time.perf_counter()  # the time that choosing took does not count for the next step
        self._ended_at = now

    def _model(self) -> None:
        """Fit the link and predict each strategy, when the compressed steps are over."""
        measured = [np.median(seen[-2:], axis=0) for seen in self._seen.values()]
        step = statistics.median(self._seconds[-2:])
        mean = agreed(self._between, self._name, np.array([*np.ravel(measured), step])).mean(axis=0)
        links = {kind: fit(probe(self._between, self._name, kind)) for kind in ("allgather", "allreduce", "alltoall")}
        predicted = []
        for bucket, seen in zip(self._buckets, mean[:-1].reshape(-1, 2), strict=True):
            switch, size = bucket.communicator, bucket.size
            codecs = {
                strategy: codec_of(size, *((switch.payload_bytes(strategy, size), 0.0) if strategy in DENSE else seen))
                for strategy in switch.available_strategies(self._transport)
            }
            predicted.append(
                {
                    strategy: seconds_of(strategy, size, codec, links, self._transport.hosts)
                    for strategy, codec in codecs.items()
                }
            )
        for seen in self._seen.values():
            seen.clear()
        step = float(mean[-1])
        self._length = min(max(math.ceil(_SECONDS / step), _TRIAL), _LONGEST_TRIAL)
        self._begin_round(plans(predicted, slack=step), 1)

    def _begin_round(self, found: list[tuple[str, ...]], number: int) -> None:
        """Begin a round of trials of these plans."""
        self._round, self._trials = number, [*found, *reversed(found)]
        self._begin_next_trial()

    def _begin_next_trial(self) -> None:
        """Begin the next trial, or judge the round when there is none."""
        if self._trials:
            self._switch_to(self._trials.pop(0))
            self._left, self._next = _SETTLES + self._length, self._end_trial
        else:
            self._judge()

    def _end_trial(self) -> None:
        self._results.append((statistics.median(self._seconds[_SETTLES:]), self.plan))
        self._begin_next_trial()

    def _judge(self) -> None:
        """Try the plans of this round that are close to the fastest again, or choose one of them."""
        means = agreed(self._between, self._name, np.array([seconds for seconds, _ in self._results])).mean(axis=0)
        of_plan: dict[tuple[str, ...], list[float]] = {}
        for seconds, (_, plan) in zip(means, self._results, strict=True):
            of_plan.setdefault(plan, []).append(float(seconds))
        tried = [(statistics.mean(seconds), plan) for plan, seconds in of_plan.items() if len(seconds) == 2 * self._round]
        most = (1 + _CLOSE / self._round) * min(tried)[0]
        close = [plan for seconds, plan in tried if seconds <= most]
        if self._round < _ROUNDS and len(close) > 1:
            self._begin_round(close, self._round + 1)
        else:
            self._choose(tried)

    def _choose(self, tried: list[tuple[float, tuple[str, ...]]]) -> None:
        """Choose the fastest plan; of those that are as fast, the most exact one. tried: seconds of a step, and the plan."""
        fast = _SAME * min(seconds for seconds, _ in tried)
        self._expected, chosen = max((one for one in tried if one[0] <= fast), key=lambda one: self._exactness(one[1]))
        self._switch_to(chosen)
        if self._transport.rank == 0:
            _LOG.info(
                "auto: %s",
                "; ".join(f"{1e3 * seconds:.3g} ms a step with {_described(plan)}" for seconds, plan in sorted(tried)),
            )
        self._steps, self._left, self._next = 0, _CHECK, self._recheck

    def _exactness(self, plan: tuple[str, ...]) -> int:
        """Bytes that a plan sends dense."""
        return sum(
            bucket.communicator.payload_bytes(strategy, bucket.size)
            for bucket, strategy in zip(self._buckets, plan, strict=True)
            if strategy in DENSE
        )

    def _recheck(self) -> None:
        """Check whether the choice is still good."""
        self._steps += _CHECK
        taken = float(agreed(self._between, self._name, np.array([statistics.median(self._seconds)])).mean())
        self._seconds.clear()
        self._left = _CHECK
        if self._steps == _CHECK:  # the plan that won may have been lucky in its trials
            self._expected = min(max(self._expected, taken), _SLOWER * self._expected)
        if self._steps >= self._wait:
            self._wait *= 10
            self._start()
        elif taken > _SLOWER * self._expected:
            self._start()


def _described(plan: tuple[str, ...]) -> str:
    return " and ".join(f"{plan.count(strategy)} {strategy}" for strategy in dict.fromkeys(plan))
