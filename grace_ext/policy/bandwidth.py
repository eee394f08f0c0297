"""The bandwidth of the link, estimated from the exchange's own collectives.

Xin et al., Kimad, DistributedML 2023, section 3, needs an estimate at the start of each step. Here it is the median of the
last steps', which one disturbed step does not move. A step's rate is its bytes divided by all the time that they took,
waiting for other ranks included. So a budget of bytes that follows from the rate leaves time for as much waiting.
"""

import collections
import math
import statistics

from ..errors import ConfigError

_GROWTH = 1.25


class BandwidthMonitor:
    """The bandwidth of one rank's link.

    A step's sample is the bytes of its collectives by the time in which at least one of them was under way. A step in which
    all collectives were over before anybody waited for them shows that the link gives more than it was asked for: its sample
    is a quarter above the estimate, or what came through if that is more.

    Args:
        window: Number of last steps whose median is the estimate.
        prior: Bytes per second until there is a sample; None: unknown.

    Raises:
        ConfigError: An argument is outside its range.
    """

    def __init__(self, window: int = 5, prior: float | None = None):
        if window < 1:
            raise ConfigError(f"window={window}; allowed: from 1 on")
        if prior is not None and not (math.isfinite(prior) and prior > 0):
            raise ConfigError(f"prior={prior}; allowed: bytes per second, finite and above 0, or None")
        self._samples: collections.deque[float] = collections.deque(maxlen=window)
        self._prior = prior
        self._spans: list[tuple[float, float, bool]] = []
        self._bytes = 0.0

    @property
    def estimate(self) -> float | None:
        """Bytes per second; None if nothing is known."""
        return statistics.median(self._samples) if self._samples else self._prior

    @property
    def samples(self) -> tuple[float, ...]:
        """Bytes per second of each of the last steps, in their order."""
        return tuple(self._samples)

    def add(self, sent: float, started: float, ended: float, late: bool = False) -> None:
        """Count a collective of this step.

        Args:
            sent: Bytes that left this rank.
            started: When the collective started, in seconds of time.perf_counter.
            ended: When it was seen to have ended.
            late: Whether it may have ended long before it was seen.
        """
        if ended > started:
            self._bytes += sent
            self._spans.append((started, ended, late))

    def end_step(self) -> None:
        """Take the step's sample."""
        busy = union_length([(start, end) for start, end, _ in self._spans])
        if self._bytes and busy > 0:
            sample = self._bytes / busy
            _, _, late = max(self._spans, key=lambda span: span[1])
            if late and self.estimate is not None:
                sample = max(sample, _GROWTH * self.estimate)
            self._samples.append(sample)
        self._clear_step()

    def abort(self) -> None:
        """Forget a step that failed."""
        self._clear_step()

    def _clear_step(self) -> None:
        self._spans.clear()
        self._bytes = 0.0


def union_length(spans: list[tuple[float, float]]) -> float:
    """Compute the time that is in at least one of some spans.

    Args:
        spans: (start, end) of each.

    Returns:
        The length of their union.
    """
    total, until = 0.0, -math.inf
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, until))
        until = max(until, end)
    return total
