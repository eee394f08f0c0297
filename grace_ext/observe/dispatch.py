"""Tells captures, writers, timelines and warnings of an exchange's steps."""

import math
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from ..communicators.base import Pending
from ..transport.base import Transport
from ..transport.tracing import TracingTransport
from . import advice
from .base import Writer
from .capture import Capture
from .listener import BucketView, StepListener
from .norms import energy, lag
from .parse import Observe, observers
from .timeline import Timeline, encoding_phases, finishing_phases


class ObserverDispatcher(StepListener):
    """Serves the observers of one exchange. Without anything to see in a step, its methods return after a comparison.

    Args:
        transport: The exchange's transport.
        observe: See grace_ext.observe.observers.
        capture: Saves gradients of rank 0; None for nothing.
    """

    def __init__(self, transport: Transport, observe: Observe = None, capture: Capture | None = None):
        self._transport = transport
        here = [one for one in observers(observe) if one.every_rank or transport.rank == 0]
        self._capture = capture if transport.rank == 0 else None
        self._writers = [one for one in here if isinstance(one, Writer)]
        self._timelines = [one for one in here if isinstance(one, Timeline)]
        self._growth = advice.ResidualGrowthCheck() if transport.rank == 0 and advice.warnings_wanted() else None
        self._waiting = (advice.LagCheck(), advice.StarvedCheck()) if self._growth else ()
        can_probe = transport.size > 1 and transport.probe_transport() is not None
        self._cost = advice.CodecCostCheck(transport) if can_probe and advice.warnings_wanted() else None
        self._norms: dict[str, tuple[float, float]] = {}  # last seen, by tensor: those of the gradient and of the residual
        self._seen: dict[str, tuple[float, float]] = {}  # in this step
        self._traces: dict[str, TracingTransport] = {}
        self._before: dict[str, dict[str, float]] = {}  # by bucket that is being received, its seconds by stage
        self._buckets: Sequence[BucketView] = []
        self._stepped: list[str] = []  # names of the tensors whose lag is looked at
        self._drawing = threading.Lock()  # the worker may receive a bucket while the caller does

    def signature(self) -> tuple:
        return (self._cost is not None,)

    def stats(self) -> dict:
        return {"residual_norm_ratio": _norm_ratios(self._norms)}

    def buckets_set(self, buckets: Sequence[BucketView]) -> None:
        self._buckets = buckets
        self._stepped = [
            tensor.name
            for bucket in buckets
            if bucket.memory.needs_step and bucket.memory.residual_is_of_gradients
            for tensor in bucket.tensors
        ]

    def gradient_callback(self, step: int, bucket: BucketView) -> Callable | None:
        callbacks = [self._norms_of(bucket)] if self._wants_norms(step) else []
        if self._capture and (captures := self._capture.gradient_callback(step, bucket)):
            callbacks.append(captures)
        if not callbacks:
            return None
        return lambda gradient, residual: [callback(gradient, residual) for callback in callbacks]

    def bucket_transport(self, step: int, bucket: BucketView, transport: Transport) -> Transport:
        if not any(timeline.wants(step) for timeline in self._timelines):
            return transport
        self._traces[bucket.name] = TracingTransport(transport)
        return self._traces[bucket.name]

    def receiving(self, step: int, bucket: BucketView, pending: Pending) -> None:
        trace = self._traces.get(bucket.name)
        if trace is None:
            return
        if trace.started_at is not None:
            self._draw(bucket, step, encoding_phases(pending.seconds, trace.started_at))
            trace.started_at = None
        self._before[bucket.name] = dict(pending.seconds)

    def received(self, step: int, bucket: BucketView, pending: Pending) -> None:
        before = self._before.pop(bucket.name, None)
        if before is not None:
            self._draw(bucket, step, finishing_phases(pending.seconds, before, time.perf_counter()))

    def bucket_finished(self, step: int, bucket: BucketView, pending: Pending) -> None:
        if self._cost and self._cost.counts_step(step):
            self._cost.add(bucket, pending)

    def end_step(self, step: int, finite: bool, report: Callable[[], dict]) -> None:
        seen = self._seen if finite else {}
        self._norms.update(seen)
        writers = [writer for writer in self._writers if step % writer.every == 0]
        if writers:
            record = {
                "step": step,
                "time": time.time(),
                "rank": self._transport.rank,
                "finite": finite,
                **report(),
                "lag": lag([(gradient**2, residual**2) for gradient, residual in seen.values()]),
                "residual_norm_ratio": _norm_ratios(seen),
            }
            for writer in writers:
                writer.attempt(writer.write, record)
        if self._growth:
            wanted = seen if seen and self._growth.wants() else None
            self._growth.end_step(finite, wanted, report()["compressed"]["ratio"] if seen else 1.0)
            stepped = {name: wanted[name] for name in self._stepped if name in wanted} if wanted else {}
            for check in self._waiting if stepped else ():
                check.end_step(self._growth.steps, stepped)
        if self._capture:
            self._capture.end_step(step, finite)
        self._forget_step()
        if (
            self._cost
            and self._cost.counts_step(step)
            and not all(bucket.compressor.exact or bucket.communicator.switches for bucket in self._buckets)
        ):
            self._cost.end_step(step, finite, f"{self._buckets[0].name}.probe")

    def abort(self) -> None:
        self._forget_step()
        if self._capture:
            self._capture.forget()
        if self._cost:
            self._cost.forget()

    def _forget_step(self) -> None:
        self._seen = {}
        self._traces.clear()
        self._before.clear()

    def _wants_norms(self, step: int) -> bool:
        return (
            self._growth is not None
            and self._growth.wants()
            or any(step % writer.every == 0 and not writer.ended for writer in self._writers)
        )

    def _norms_of(self, bucket: BucketView) -> Callable:
        seen = self._seen  # the worker of a step that failed may still be at work when the next step begins

        def keep(gradient: Any, residual: Any) -> None:
            if residual is not None:
                at = 0
                for tensor in bucket.tensors:
                    part = slice(at, at + tensor.size)
                    seen[tensor.name] = math.sqrt(energy(gradient[part])), math.sqrt(energy(residual[part]))
                    at += tensor.size

        return keep

    def _draw(self, bucket: BucketView, step: int, phases: list[tuple[str, float, float]]) -> None:
        with self._drawing:
            for timeline in self._timelines:
                if phases and timeline.wants(step):
                    timeline.attempt(timeline.add, self._transport.rank, bucket.name, step, phases)


def _norm_ratios(norms: dict[str, tuple[float, float]]) -> dict[str, float | None]:
    """Return the residual's norm over the gradient's by tensor; None where that is no number."""
    return {name: _number(residual, gradient) for name, (gradient, residual) in norms.items()}


def _number(residual: float, gradient: float) -> float | None:
    ratio = residual / gradient if gradient > 0 else math.nan
    return ratio if math.isfinite(ratio) else None
