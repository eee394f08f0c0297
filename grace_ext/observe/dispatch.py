"""All that an exchange tells to those who look on: captures, writers, timelines, warnings."""

import math
import threading
import time
from collections.abc import Callable

import numpy as np

from ..communicators.base import Pending
from ..transport.base import Transport
from . import advice
from .base import Writer
from .capture import Capture
from .parse import observers
from .timeline import Mark, Timeline, encoding, finishing


class Watch:
    """Of one exchange. Without anything to look at in a step, its methods return after a comparison.

    observe: see grace_ext.observe.observers.
    """

    def __init__(self, transport: Transport, observe=None, capture: Capture | None = None):
        self._transport = transport
        here = [one for one in observers(observe) if one.every_rank or transport.rank == 0]
        self._capture = capture if transport.rank == 0 else None
        self._writers = [one for one in here if isinstance(one, Writer)]
        self._timelines = [one for one in here if isinstance(one, Timeline)]
        self._growth = advice.Growth() if transport.rank == 0 and advice.wanted() else None
        can_probe = transport.size > 1 and transport.between_steps() is not None
        self._cost = advice.Cost(transport) if can_probe and advice.wanted() else None
        #: The norms that were last seen of each tensor with a residual: of the gradient and the residual.
        self.norms: dict[str, tuple[float, float]] = {}
        self._seen: dict[str, tuple[float, float]] = {}  # in this step
        self._marks: dict[str, Mark] = {}
        self._drawing = threading.Lock()  # the worker may receive a bucket while the caller does

    def signature(self) -> tuple:
        """What has to be the same on all ranks."""
        return (self._cost is not None,)

    def residual_norm_ratios(self) -> dict[str, float | None]:
        return {name: _number(residual, gradient) for name, (gradient, residual) in self.norms.items()}

    # A step, in the order of its calls

    def look(self, step: int, bucket) -> Callable | None:
        """What a bucket is to call with (gradient, residual or None) before it encodes; None if nobody looks."""
        looks = [self._norms_of(bucket)] if self._wants_norms(step) else []
        if self._capture and (captures := self._capture.of(step, bucket)):
            looks.append(captures)
        if not looks:
            return None
        return lambda gradient, residual: [look(gradient, residual) for look in looks]

    def timed(self, step: int, bucket, transport: Transport) -> Transport:
        """The transport that the bucket is to start with."""
        if not any(timeline.wants(step) for timeline in self._timelines):
            return transport
        self._marks[bucket.name] = Mark(transport)
        return self._marks[bucket.name]

    def before(self, step: int, bucket, pending: Pending) -> dict[str, float] | None:
        """Before a bucket is advanced or finished; what it returns is for `after`."""
        mark = self._marks.get(bucket.name)
        if mark is None:
            return None
        if mark.at is not None:
            self._draw(bucket, step, encoding(pending.seconds, mark.at))
            mark.at = None
        return dict(pending.seconds)

    def after(self, step: int, bucket, pending: Pending, before: dict[str, float] | None) -> None:
        if before is not None:
            self._draw(bucket, step, finishing(pending.seconds, before, time.perf_counter()))

    def finished(self, step: int, bucket, pending: Pending) -> None:
        """After a bucket's last `after`."""
        if self._cost and self._cost.counts(step):
            self._cost.add(bucket, pending)

    def end_step(self, step: int, finite: bool, report: Callable[[], dict], buckets: list) -> None:
        """When all is done and nothing is under way. report: gives the step's part of Exchange.stats."""
        seen = self._seen if finite else {}
        self.norms.update(seen)
        writers = [writer for writer in self._writers if step % writer.every == 0]
        if writers:
            record = {"step": step, "time": time.time(), "rank": self._transport.rank, "finite": finite, **report(),
                      "residual_norm_ratio": {name: _number(residual, gradient) for name, (gradient, residual)
                                              in seen.items()}}
            for writer in writers:
                writer.attempt(writer.write, record)
        if self._growth:
            self._growth.end_step(finite, seen if seen and self._growth.wants() else None,
                                  report()["compressed"]["ratio"] if seen else 1.0)
        if self._capture:
            self._capture.end_step(step, finite)
        self._forget_step()
        if self._cost and self._cost.counts(step) and not all(
                bucket.compressor.exact or bucket.communicator.chooses for bucket in buckets):
            self._cost.end_step(step, finite, f"{buckets[0].name}.probe")

    def forget(self) -> None:
        """The step failed."""
        self._forget_step()
        if self._capture:
            self._capture.forget()
        if self._cost:
            self._cost.forget()

    def _forget_step(self) -> None:
        self._seen = {}
        self._marks.clear()

    def _wants_norms(self, step: int) -> bool:
        return (self._growth is not None and self._growth.wants()
                or any(step % writer.every == 0 and not writer.ended for writer in self._writers))

    def _norms_of(self, bucket) -> Callable:
        seen = self._seen  # a failed step's worker may still be at work when the next begins

        def look(gradient, residual):
            if residual is not None:
                at = 0
                for tensor in bucket.tensors:
                    part = slice(at, at + tensor.size)
                    seen[tensor.name] = _norm(gradient[part]), _norm(residual[part])
                    at += tensor.size

        return look

    def _draw(self, bucket, step, phases) -> None:
        with self._drawing:
            for timeline in self._timelines:
                if phases and timeline.wants(step):
                    timeline.attempt(timeline.add, self._transport.rank, bucket.name, step, phases)


def _norm(array) -> float:
    """L2, of float32[n] of numpy, or of a tensor with a norm of its own."""
    if isinstance(array, np.ndarray):
        with np.errstate(over="ignore", invalid="ignore"):
            return math.sqrt(float(np.dot(array, array)))
    return float(array.norm())


def _number(residual: float, gradient: float) -> float | None:
    ratio = residual / gradient if gradient > 0 else math.nan
    return ratio if math.isfinite(ratio) else None
