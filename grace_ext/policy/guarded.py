"""A density that is raised while too much of the gradients waits in residuals, and lowered while little does."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ..errors import ConfigError
from ..observe.listener import BucketView, StepListener
from ..observe.norms import energy, lag
from ..registry import register
from ..transport.base import Transport
from ..transport.link_probe import agreed
from .schedules import Schedule, refuse_switching

EVERY = 16  # steps from one measurement to the next; in the beginning after 1, 2, 4 and 8 steps
_GAIN, _LARGEST = 0.3, 4.0  # the density changes by the power 0.3 of what the lag is too large by, which counts up to 4


@register
class Guarded(Schedule):
    """A schedule of the density that bounds the lag of the training, the same on all ranks.

    The lag is the sum of squares of all ranks' residuals over that of their gradients. Where gradients are mostly noise,
    that is the number of steps whose gradients wait to be sent. After t steps it is to be `share` times the root of t: early
    gradients are worth more, and a longer training can wait longer. So it needs to know neither the task nor its length. The
    spec's density counts only as that of tensors that the schedule cannot measure. Measurements are one pass over gradients
    and residuals and one collective of 16 bytes in 16 steps.

    Args:
        share: The lag after one step, above 0.
        start: The density of the first steps, and the largest one.
        least: The smallest density.

    Raises:
        ConfigError: An argument is outside its range.

    Source:
        docs/transformers.md: the loss rises with the mean of what the lag exceeds 0.15 sqrt(t) by. That errors of error
        feedback may grow with the length of the training: Karimireddy et al., ICML 2019, theorem II.
    """

    name = "guarded"
    adaptive = True
    keeps_densities = True

    def __init__(self, share: float = 0.15, start: float = 0.25, least: float = 0.001):
        if not (math.isfinite(share) and share > 0):
            raise ConfigError(f"guarded: share={share}; allowed: finite and above 0")
        if not 0 < least <= start <= 1:
            raise ConfigError(f"guarded: start={start}, least={least}; allowed: 0 < least <= start <= 1")
        self.share, self.start, self.least = share, start, least

    def at(self, step: int, final: float) -> float:
        return self.start  # before anything is known

    def listener(self, transport: Transport, densities: dict[str, float]) -> "LagGuard":
        return LagGuard(self, transport, densities)


class LagGuard(StepListener):
    """Decides on the density of all buckets after the steps that it measures.

    Args:
        schedule: The Guarded.
        transport: The exchange's transport.
        densities: Density by bucket name; the decisions are written to it.

    Raises:
        ConfigError: The transport has no collectives between steps.
    """

    def __init__(self, schedule: Guarded, transport: Transport, densities: dict[str, float]):
        self._schedule, self._transport, self._densities = schedule, transport, densities
        self._between = transport.probe_transport()
        if self._between is None and transport.size > 1:
            raise ConfigError("schedule 'guarded' needs an adapter with collectives between steps")
        self._buckets: Sequence[BucketView] = []
        self._seen: dict[str, tuple[float, float]] = {}  # by bucket: the energies of the gradient and of the residual
        #: The lag when it was last measured; None before.
        self.lag: float | None = None

    def check_buckets(self, buckets: Sequence[BucketView]) -> None:
        """Check that there is something to guard, in all steps; see StepListener.

        Args:
            buckets: The buckets.

        Raises:
            ConfigError: No bucket has both a density and a residual, or one has the communicator "auto".
        """
        refuse_switching(self._schedule, buckets)
        if buckets and not any(map(_is_guarded, buckets)):
            raise ConfigError(
                "schedule 'guarded' bounds what waits in residuals, and no tensor has both a density and a residual of gradients: use a "
                "spec with a density, as topk, and a memory with a residual, as 'residual' or 'adam'"
            )

    def buckets_set(self, buckets: Sequence[BucketView]) -> None:
        self._buckets = [bucket for bucket in buckets if _is_guarded(bucket)]
        self._seen = {}
        self._densities.clear()
        for bucket in buckets:
            if bucket.declared.has_density and not _is_guarded(bucket):
                self._densities[bucket.name] = bucket.declared.density

    def gradient_callback(self, step: int, bucket: BucketView) -> Callable | None:
        if not (_is_measured(step) and _is_guarded(bucket)):
            return None
        seen = self._seen  # the worker of a step that failed may still be at work when the next step begins

        def measure(gradient: Any, residual: Any) -> None:
            seen[bucket.name] = energy(gradient), energy(residual)

        return measure

    def end_step(self, step: int, finite: bool, report: Callable[[], dict]) -> None:
        if not _is_measured(step) or not self._buckets:
            return
        own = np.array([*self._seen.values(), (0.0, 0.0)]).sum(axis=0)
        self._seen = {}
        name = f"{self._buckets[0].name}.lag"
        found = lag([own] if self._between is None else list(agreed(self._between, name, own)))
        if finite and found is not None:
            self.lag = found
            self._decide(self.lag / (self._schedule.share * math.sqrt(step)))

    def _decide(self, excess: float) -> None:
        """Change the density, where the lag is `excess` times what it is to be."""
        factor = min(max(excess, 1 / _LARGEST), _LARGEST) ** _GAIN
        before = self._densities.get(self._buckets[0].name, self._schedule.start)
        density = min(max(before * factor, self._schedule.least), self._schedule.start)
        self._densities.update({bucket.name: float(f"{density:.3g}") for bucket in self._buckets})

    def abort(self) -> None:
        self._seen = {}

    def stats(self) -> dict:
        densities = {
            tensor.name: self._densities.get(bucket.name, self._schedule.start)
            for bucket in self._buckets
            for tensor in bucket.tensors
        }
        return {"lag": self.lag, "densities": densities}


def _is_guarded(bucket: BucketView) -> bool:
    memory = bucket.memory
    return bucket.declared.has_density and "residual" in memory.states and memory.residual_is_of_gradients


def _is_measured(step: int) -> bool:
    """Whether the residual that a step begins with is measured. step: from 0."""
    return step % EVERY == 0 and step > 0 or step in (1, 2, 4, 8)
