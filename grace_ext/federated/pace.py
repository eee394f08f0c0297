"""How many bytes a message may have for a round to take as long as it should: Kimad's budget on a parameter server.

Xin et al., Kimad: adaptive gradient compression with bandwidth awareness, DistributedML 2023, section 3 and Algorithm 3: a
budget c = B (t - T_comp) / 2 of bytes each way.
"""

import math
import statistics
from collections import deque

from ..errors import ConfigError
from ..pipeline.compressor import Compressor
from ..policy.bandwidth import BandwidthMonitor
from ..policy.kimad import is_full, sizes_like, uniform
from ..policy.schedules import Schedules

_FOLLOWS = Schedules({"density": "kimad"})


class Pace:
    """Of one client. seconds: that a round is to take. window: rounds whose median is the bandwidth, and the computing."""

    def __init__(self, seconds: float, window: int = 5):
        if not (math.isfinite(seconds) and seconds > 0):
            raise ConfigError(f"pace: seconds={seconds}; allowed: finite and above 0")
        self._seconds, self._window, self._computing = seconds, window, deque(maxlen=window)
        self._monitor = BandwidthMonitor(window)

    def add(self, nbytes: int, elapsed: float, computing: float) -> None:
        """A round of this client: bytes both ways, seconds from the model's sending to the update's coming, and those that
        the client says it computed, of which no more than have passed are believed."""
        computing = min(max(computing, 0.0), elapsed) if math.isfinite(computing) else 0.0
        self._computing.append(computing)
        self._monitor.add(nbytes, computing, elapsed)
        self._monitor.end_step()

    def missed(self, nbytes: int, elapsed: float) -> None:
        """A round in which nothing came from this client in so many seconds, after so many bytes to it: its link gives less
        than what was known, and half of that is tried."""
        known = nbytes / elapsed if self.bandwidth is None else self.bandwidth / 2
        self._monitor = BandwidthMonitor(self._window, prior=known)

    @property
    def bandwidth(self) -> float | None:
        """Bytes per second; None before anything is known."""
        return self._monitor.estimate

    @property
    def budget(self) -> float | None:
        """Bytes of a message in each direction; None before anything is known."""
        if self.bandwidth is None:
            return None
        return self.bandwidth * max(0.0, self._seconds - statistics.median(self._computing or [0.0])) / 2


class Fitted:
    """A compressor for vectors of `size` elements whose density follows budgets of bytes. Raises ConfigError for one without
    a density."""

    def __init__(self, compressor: Compressor, size: int):
        if "density" not in compressor.sparsifier.options():
            raise ConfigError(f"{str(compressor)!r} has no density that could follow the bandwidth")
        self._compressor, self._size = compressor, size
        self._made, self._sizes = compressor, None

    def at(self, budget: float | None) -> Compressor:
        """For the next message. budget: bytes; None: not known."""
        if budget is not None and self._sizes is not None:
            self._made = _FOLLOWS.at(self._compressor, 0, uniform(self._sizes, max(budget, 1.0)))
        return self._made

    def sent(self, nbytes: int) -> None:
        """What the message took that was made with the last compressor of `at`."""
        message = nbytes, self._made.sparsifier.density, self._size
        if is_full(*message):
            self._sizes = sizes_like(*message)
