"""The fewest bytes for the error of the spec's density, spread over the buckets: L-GreCo."""

import math

import numpy as np

from ..communicators.base import Pending
from ..errors import ConfigError
from ..observe.listener import BucketView
from ..registry import register
from ..transport.base import Transport
from .allocation import DENSITIES, least_bytes
from .kimad import CURVES, CurveController
from .schedules import Schedule

_TELLING = 64  # elements from which a container's bytes tell what more of them would take


@register
class LGreCo(Schedule):
    """A schedule that gives each bucket a density of its own, so that a rank sends the fewest bytes for an error.

    The squared error that all buckets together may have is the one that they would have with the spec's density, times `error`.
    It is the dual of `kimad+`: a budget of error in the place of a budget of bytes. Gradients are measured in every tenth step,
    with their residuals, and the densities stay until the next one. It takes several buckets to choose between; with Horovod,
    `bucket_bytes` or `groups` make them.

    Args:
        error: Factor of the error that the spec's density gives; finite and above 0.

    Raises:
        ConfigError: The factor is outside its range.

    Source:
        Alimohammadi, Markov, Frantar and Alistarh, L-GreCo: layerwise-adaptive gradient compression, MLSys 2024, Algorithm 1.
    """

    name = "lgreco"
    adaptive = True

    def __init__(self, error: float = 1.0):
        if not (math.isfinite(error) and error > 0):
            raise ConfigError(f"lgreco: error={error}; allowed: finite and above 0")
        self.error = error

    def at(self, step: int, final: float) -> float:
        return final  # before anything is known

    def listener(self, transport: Transport, densities: dict[str, float]) -> "ErrorController":
        return ErrorController(self, transport, densities)


class ErrorController(CurveController):
    """Decides by the error that is allowed.

    Args:
        schedule: The LGreCo.
        transport: The exchange's transport.
        densities: Density by bucket name; the decisions are written to it.
    """

    def __init__(self, schedule: LGreCo, transport: Transport, densities: dict[str, float]):
        super().__init__(schedule, transport, densities, by_bucket=True)
        self._allowed = schedule.error

    def bucket_finished(self, step: int, bucket: BucketView, pending: Pending) -> None:
        if bucket.name not in self._sent or bucket.compressor.density * bucket.size >= _TELLING:
            super().bucket_finished(step, bucket, pending)

    def _decide(self) -> None:
        if (self._step - 1) % CURVES:
            return  # nothing was measured
        weighed = [bucket for bucket in self._buckets if bucket.name in self._sent and bucket.name in self._curves]
        if not weighed:
            return
        curves = [self._curves[bucket.name] for bucket in weighed]
        budget = self._allowed * sum(
            float(curve(max(1.0, round(bucket.declared.density * bucket.size))))
            for bucket, curve in zip(weighed, curves, strict=True)
        )
        chosen = least_bytes(curves, np.array([self._sizes(bucket) for bucket in weighed]), budget)
        self.densities.update({bucket.name: DENSITIES[choice] for bucket, choice in zip(weighed, chosen, strict=True)})
