"""How many bytes a message may have so that a round takes as long as it should: Kimad's budget on a parameter server.

Xin et al., Kimad: adaptive gradient compression with bandwidth awareness, DistributedML 2023, section 3 and Algorithm 3: a
budget of c = B (t - T_comp) / 2 bytes in each direction.
"""

import math
import statistics
from collections import deque

from ..errors import ConfigError
from ..pipeline.compressor import Compressor
from ..policy.bandwidth import BandwidthMonitor
from ..policy.kimad import fills_density, predict_sizes, uniform_density
from ..policy.schedules import with_density


class Pace:
    """Measures the link and the computing time of one client, and derives its budget.

    Args:
        seconds: Duration that a round should have, finite and above 0.
        window: Number of rounds; bandwidth and computing time are the medians over them.

    Raises:
        ConfigError: `seconds` is out of range.
    """

    def __init__(self, seconds: float, window: int = 5):
        if not (math.isfinite(seconds) and seconds > 0):
            raise ConfigError(f"pace: seconds={seconds}; allowed: finite and above 0")
        self._seconds, self._window, self._computing = seconds, window, deque(maxlen=window)  # type: ignore[var-annotated]
        self._monitor = BandwidthMonitor(window)

    def add(self, nbytes: int, elapsed: float, computing: float) -> None:
        """Add a round of the client.

        Args:
            nbytes: Bytes sent in both directions.
            elapsed: Seconds from sending the model to receiving the update.
            computing: Seconds that the client says it computed; no more than `elapsed` is believed.
        """
        computing = min(max(computing, 0.0), elapsed) if math.isfinite(computing) else 0.0
        self._computing.append(computing)
        self._monitor.add(nbytes, computing, elapsed)
        self._monitor.end_step()

    def missed(self, nbytes: int, elapsed: float) -> None:
        """Add a round in which no update arrived: half of the known bandwidth is tried next.

        Args:
            nbytes: Bytes that were sent to the client.
            elapsed: Seconds that the server waited.
        """
        known = nbytes / elapsed if self.bandwidth is None else self.bandwidth / 2
        self._monitor = BandwidthMonitor(self._window, prior=known)

    @property
    def bandwidth(self) -> float | None:
        """Bandwidth in bytes per second; None before anything is known."""
        return self._monitor.estimate

    @property
    def budget(self) -> float | None:
        """Bytes that a message may have in each direction; None before anything is known."""
        if self.bandwidth is None:
            return None
        return self.bandwidth * max(0.0, self._seconds - statistics.median(self._computing or [0.0])) / 2


class Fitted:
    """A compressor whose density follows a budget of bytes.

    Args:
        compressor: The compressor, which must have a density.
        size: Number of elements of the vectors that it compresses.

    Raises:
        ConfigError: The compressor has no density.
    """

    def __init__(self, compressor: Compressor, size: int):
        if not compressor.has_density:
            raise ConfigError(f"{str(compressor)!r} has no density that could follow the bandwidth")
        self._compressor, self._size = compressor, size
        self._made, self._sizes = compressor, None

    def at(self, budget: float | None) -> Compressor:
        """Choose the compressor for the next message.

        Args:
            budget: Bytes that the message may have; None: not known.

        Returns:
            A compressor with the density that fits the budget, or the last one if nothing is known yet.
        """
        if budget is not None and self._sizes is not None:
            self._made = with_density(self._compressor, uniform_density(self._sizes, max(budget, 1.0)))
        return self._made

    def sent(self, nbytes: int) -> None:
        """Learn from the size of the message that was made with the last compressor of `at`.

        Args:
            nbytes: Bytes of the message.
        """
        message = nbytes, self._made.density, self._size
        if fills_density(*message):
            self._sizes = predict_sizes(*message)  # type: ignore[assignment]
