"""The density that a step's time leaves room for: Kimad, and Kimad+ with a density for each bucket.

Xin et al., Kimad: adaptive gradient compression with bandwidth awareness, DistributedML 2023, section 3: a budget
c = B (t - T_comp) / 2 of bytes each way. Here ranks send to each other, both directions at a time, and a container
costs as many copies of it on the link as the communicator sends.
"""

import contextlib
import functools
import math
import statistics
import time
from collections import deque
from collections.abc import Callable, Sequence

import numpy as np

from ..communicators.base import Pending
from ..errors import ConfigError
from ..observe.listener import BucketView, StepListener
from ..registry import register
from ..transport.base import Transport
from ..transport.metered import MeteredTransport
from .allocation import DENSITIES, ErrorCurve, least_error
from .bandwidth import BandwidthMonitor
from .schedules import Schedule, refuse_switching

CURVES = 10  # steps from one measurement of the error curves to the next
#: Least and most bits of an element in a container: from the least on, more elements always take more bytes; the most is an
#: uncompressed position and value.
_BITS = 1.5, 64.0
_OVERHEAD = 40  # bytes of a container without elements


@register
class Kimad(Schedule):
    """A schedule of the density that keeps steps to a time.

    Args:
        seconds: Seconds that a step is to take, computation included.
        prior: Bytes per second that the link gives, as far as is known before the first step; 0: begin with the spec's
            density.
        window: Number of last steps whose median is the bandwidth.

    Raises:
        ConfigError: An argument is outside its range.

    Source:
        Xin et al., Kimad: adaptive gradient compression with bandwidth awareness, DistributedML 2023, section 3.1.
    """

    name = "kimad"
    adaptive = True
    #: Whether buckets get densities of their own.
    by_bucket = False

    def __init__(self, seconds: float = 1.0, prior: float = 0.0, window: int = 5):
        if not (math.isfinite(seconds) and seconds > 0):
            raise ConfigError(f"{self.name}: seconds={seconds}; allowed: finite and above 0")
        if not (math.isfinite(prior) and prior >= 0):
            raise ConfigError(f"{self.name}: prior={prior}; allowed: bytes per second, or 0")
        if window < 1:
            raise ConfigError(f"{self.name}: window={window}; allowed: from 1 on")
        self.seconds, self.prior, self.window = seconds, prior, window

    def at(self, step: int, final: float) -> float:
        return final  # before anything is known

    def listener(self, transport: Transport, densities: dict[str, float]) -> "DensityController":
        return DensityController(self, transport, densities)


@register
class KimadPlus(Kimad):
    """Kimad with the budget spread over the buckets so that the total squared error is the least.

    For the arguments see Kimad, for the method grace_ext.policy.allocation.

    Source:
        Xin et al., Kimad: adaptive gradient compression with bandwidth awareness, DistributedML 2023, section 3.2.
    """

    name = "kimad+"
    by_bucket = True


class CurveController(StepListener):
    """Measures what densities would cost one rank, bytes and error of each bucket, and decides between steps.

    Containers describe themselves, so ranks may differ.

    Args:
        schedule: The schedule that it decides for.
        transport: The exchange's transport.
        densities: Density by bucket name; the decisions are written to it.
        by_bucket: Whether error curves are needed, which are measured in every tenth step.
    """

    def __init__(self, schedule: Schedule, transport: Transport, densities: dict[str, float], by_bucket: bool):
        self._schedule, self._transport, self.densities = schedule, transport, densities
        self._by_bucket = by_bucket
        self._buckets: Sequence[BucketView] = []
        self._step = 0  # since there are these buckets
        #: By bucket: bytes on the link in the last step, and the density that they belong to.
        self._sent: dict[str, tuple[float, float]] = {}
        self._fixed: dict[str, float] = {}
        self._curves: dict[str, ErrorCurve] = {}

    def check_buckets(self, buckets: Sequence[BucketView]) -> None:
        """Check that each bucket can have a density of its own on each rank; see StepListener.

        Args:
            buckets: The buckets.

        Raises:
            ConfigError: One cannot.
        """
        refuse_switching(self._schedule, buckets)
        for bucket in buckets:
            if bucket.declared.has_density and bucket.declared.sparsifier.shared:
                raise ConfigError(
                    f"schedule {self._schedule.name!r}: with {str(bucket.declared.sparsifier)!r} all ranks "
                    f"draw the same positions, so that they cannot differ in density"
                )

    def buckets_set(self, buckets: Sequence[BucketView]) -> None:
        self._buckets, self._step = buckets, 0
        for kept in (self._sent, self._fixed, self._curves, self.densities):
            kept.clear()

    def compensated_gradient_callback(self, step: int, bucket: BucketView) -> Callable | None:
        wanted = self._by_bucket and self._step % CURVES == 0 and bucket.declared.has_density
        return functools.partial(self._measure, bucket.name) if wanted else None

    def _measure(self, name: str, gradient: np.ndarray, residual: np.ndarray | None) -> None:
        """Measure a bucket's error curve, in the thread that encodes."""
        with contextlib.suppress(ConfigError):  # the gradient is not finite, which the container tells all ranks
            self._curves[name] = ErrorCurve(gradient, residual)

    def bucket_finished(self, step: int, bucket: BucketView, pending: Pending) -> None:
        sent = pending.wire_bytes * bucket.communicator.wire_copies(self._transport)
        if not bucket.declared.has_density:
            self._fixed[bucket.name] = sent
        elif sent:
            self._sent[bucket.name] = sent, bucket.compressor.density

    def end_step(self, step: int, finite: bool, report: Callable[[], dict]) -> None:
        self._step += 1
        if finite:
            self._decide()

    def _decide(self) -> None:
        """Write densities for the next step."""
        raise NotImplementedError

    def stats(self) -> dict:
        return {
            "densities": {
                tensor.name: self.densities[bucket.name]
                for bucket in self._buckets
                if bucket.name in self.densities
                for tensor in bucket.tensors
            }
        }

    def _sizes(self, bucket: BucketView) -> np.ndarray:
        """Bytes on the link of a bucket with each of DENSITIES."""
        (sent, density), copies = self._sent[bucket.name], bucket.communicator.wire_copies(self._transport)
        return copies * predict_sizes(sent / copies, density, bucket.size)


class DensityController(CurveController):
    """Decides by the time that is left for the exchange.

    Args:
        schedule: The Kimad or KimadPlus.
        transport: The exchange's transport.
        densities: Density by bucket name; the decisions are written to it.
    """

    def __init__(self, schedule: Kimad, transport: Transport, densities: dict[str, float]):
        super().__init__(schedule, transport, densities, schedule.by_bucket)
        self._seconds = schedule.seconds
        self.monitor = BandwidthMonitor(schedule.window, schedule.prior or None)
        self._ended_at: float | None = None
        self._computing: deque[float] = deque(maxlen=schedule.window)
        self._waited = 0.0

    def wrap_transport(self, transport: Transport) -> Transport:
        return MeteredTransport(transport, self.monitor.add)

    def bucket_finished(self, step: int, bucket: BucketView, pending: Pending) -> None:
        self._waited += pending.seconds.get("exchange", 0.0)
        super().bucket_finished(step, bucket, pending)

    def end_step(self, step: int, finite: bool, report: Callable[[], dict]) -> None:
        now = time.perf_counter()
        if self._ended_at is not None:
            self._computing.append(now - self._ended_at - self._waited)
        self.monitor.end_step()
        super().end_step(step, finite, report)
        self._waited, self._ended_at = 0.0, time.perf_counter()

    def abort(self) -> None:
        self.monitor.abort()
        self._waited, self._ended_at = 0.0, None

    def stats(self) -> dict:
        return {"bandwidth": self.monitor.estimate, **super().stats()}

    @property
    def budget(self) -> float | None:
        """Bytes on the link for the next step; None before anything is known."""
        if self.monitor.estimate is None or not self._computing:
            return None
        left = self._seconds - statistics.median(self._computing)
        return self.monitor.estimate * max(0.0, left)

    def _decide(self) -> None:
        adapting = [bucket for bucket in self._buckets if bucket.name in self._sent]
        if self.budget is None or not adapting:
            return
        budget = max(0.0, self.budget - sum(self._fixed.values()))
        sizes = {bucket.name: self._sizes(bucket) for bucket in adapting}
        everywhere = uniform_density(sum(sizes.values()), budget)  # type: ignore[arg-type]
        self.densities.clear()
        self.densities.update(dict.fromkeys(sizes, everywhere))
        weighed = [name for name in sizes if name in self._curves] if self._by_bucket else []
        if len(weighed) > 1:
            at = np.searchsorted(DENSITIES, everywhere)
            budget -= sum(size[at] for name, size in sizes.items() if name not in weighed)
            curves, bytes_ = zip(*((self._curves[name], sizes[name]) for name in weighed), strict=True)
            chosen = least_error(curves, bytes_, max(0.0, budget))
            self.densities.update({name: DENSITIES[choice] for name, choice in zip(weighed, chosen, strict=True)})


def predict_sizes(nbytes: float, density: float, elements: int) -> np.ndarray:
    """Predict the bytes of a container with each of DENSITIES, from those of one: fewer positions take more bits each.

    Args:
        nbytes: Bytes of the container.
        density: The density that it was made with.
        elements: Number of elements of the bucket.

    Returns:
        float64[choices].
    """
    densities = np.array(DENSITIES)
    bits = _bits(nbytes, density, elements)
    if fills_density(nbytes, density, elements):
        bits = np.clip(min(bits, _BITS[1]) + np.log2(density / densities), *_BITS)  # type: ignore[assignment]
    return _OVERHEAD + np.maximum(bits, 0.0) * densities * elements / 8


def fills_density(nbytes: float, density: float, elements: int) -> bool:
    """Say whether a container holds as many elements as its density allows.

    It does not if most of the gradient was zero, or only some rows of a table were touched.

    Args:
        nbytes: Bytes of the container.
        density: The density that it was made with.
        elements: Number of elements of the bucket.

    Returns:
        Whether it holds as many.
    """
    return _bits(nbytes, density, elements) > _BITS[0]


def _bits(nbytes: float, density: float, elements: int) -> float:
    """Bits of an element in a container."""
    return 8 * (nbytes - _OVERHEAD) / max(density * elements, 1.0)


def uniform_density(sizes: np.ndarray, budget: float) -> float:
    """Find the density whose size is the budget.

    Args:
        sizes: float64[choices], bytes with each of DENSITIES, ascending.
        budget: Bytes.

    Returns:
        The density, interpolated between those of DENSITIES.
    """
    if budget <= sizes[0]:
        return DENSITIES[0]
    exponent = np.interp(math.log(budget), np.log(sizes), np.log(DENSITIES))
    return min(1.0, float(f"{math.exp(exponent):.3g}"))
