"""Traces: bandwidth over virtual time, and the times at which bytes have arrived."""

import csv
import itertools
import math

import numpy as np

from .._util.units import bits_per_second, seconds
from ..errors import ConfigError

_CELLS = 256  # pieces of a sinusoid's period
_NOISES = 16  # noise values per period of a trace
_PERIODS = 16  # number of periods after which noise repeats

SPECS = "constant:RATE, sinusoid:LOW:HIGH:PERIOD, step:LOW:HIGH:PERIOD, csv:FILE"


class Trace:
    """Bandwidth in bytes per second, piecewise constant; after its end, a trace begins again.

    Args:
        lengths: float[n], seconds of each piece, above 0.
        rates: float[n], bytes per second, at least one of them above 0.
        shift: The position in the trace, in seconds, at time 0.

    Raises:
        ConfigError: The shapes differ, or a length or rate is out of range.
    """

    def __init__(self, lengths, rates, shift: float = 0.0):
        lengths, rates = np.asarray(lengths, np.float64), np.asarray(rates, np.float64)
        if lengths.ndim != 1 or lengths.shape != rates.shape or not lengths.size:
            raise ConfigError(
                f"a trace with lengths of shape {lengths.shape} and rates of shape {rates.shape}; allowed: the "
                f"same number of both, at least 1"
            )
        if not (np.isfinite(lengths).all() and (lengths > 0).all()):
            raise ConfigError("a trace's lengths are seconds, finite and above 0")
        if not (np.isfinite(rates).all() and (rates >= 0).all() and rates.any()):
            raise ConfigError("a trace's rates are bytes per second, finite and not below 0, and not all 0")
        self._lengths, self._rates, self._shift = lengths, rates, shift
        self._times = np.concatenate([[0.0], np.cumsum(lengths)])
        self._bytes = np.concatenate([[0.0], np.cumsum(lengths * rates)])

    @property
    def period(self) -> float:
        """Duration in seconds."""
        return float(self._times[-1])

    @property
    def mean(self) -> float:
        """Mean bandwidth in bytes per second."""
        return float(self._bytes[-1] / self._times[-1])

    def rate(self, time: float) -> float:
        """Return the bandwidth at a time.

        Args:
            time: Seconds.

        Returns:
            Bytes per second.
        """
        at = np.searchsorted(self._times, (time + self._shift) % self.period, "right") - 1
        return float(self._rates[min(at, self._rates.size - 1)])

    def sent(self, time: float) -> float:
        """Compute the bytes that can be sent from the trace's beginning to a time.

        Args:
            time: Seconds.

        Returns:
            The number of bytes.
        """
        periods, rest = divmod(time + self._shift, self.period)
        return periods * self._bytes[-1] + float(np.interp(rest, self._times, self._bytes))

    def end(self, start: float, nbytes: float) -> float:
        """Compute when bytes have arrived.

        Args:
            start: The time at which they are sent, in seconds.
            nbytes: Their number.

        Returns:
            The time of arrival, in seconds.
        """
        if nbytes <= 0:
            return start
        periods, rest = divmod(self.sent(start) + nbytes, self._bytes[-1])
        if rest == 0:  # they are through before the period is over if it ends with a rate of 0
            periods, rest = periods - 1, self._bytes[-1]
        piece = int(np.searchsorted(self._bytes, rest, "left")) - 1
        left = (rest - self._bytes[piece]) / self._rates[piece]
        return max(start, periods * self.period + self._times[piece] + left - self._shift)

    def shifted(self, by: float) -> "Trace":
        """Shift the trace.

        Args:
            by: Seconds.

        Returns:
            The trace with what came `by` seconds later at each time.
        """
        return Trace(self._lengths, self._rates, self._shift + by)

    def noisy(self, spread: float, random: np.random.Generator) -> "Trace":
        """Multiply the rates by lognormal noise of mean 1, with 16 values per period.

        The noise repeats after 16 periods.

        Args:
            spread: Standard deviation of the noise's logarithm, finite, from 0 on.
            random: Random numbers.

        Returns:
            The noisy trace.

        Raises:
            ConfigError: `spread` is out of range.
        """
        if not (math.isfinite(spread) and spread >= 0):
            raise ConfigError(f"noise={spread}; allowed: finite, from 0 on")
        if spread == 0:
            return self
        edges = np.union1d(self._times[:-1], np.arange(_NOISES) * self.period / _NOISES)
        edges = np.append(edges[edges < self.period * (1 - 1e-12)], self.period)
        lengths, middles = np.diff(edges), (edges[1:] + edges[:-1]) / 2
        rates = self._rates[np.searchsorted(self._times, middles, "right") - 1]
        noise = np.exp(random.normal(-(spread**2) / 2, spread, (_PERIODS, _NOISES)))
        which = np.minimum((middles * _NOISES / self.period).astype(int), _NOISES - 1)
        return Trace(np.tile(lengths, _PERIODS), (rates * noise[:, which]).ravel(), self._shift)


def constant(rate: float) -> Trace:
    """Make a trace of constant bandwidth.

    Args:
        rate: Bytes per second.

    Returns:
        The trace.
    """
    return Trace([1.0], [rate])


def sinusoid(low: float, high: float, period: float) -> Trace:
    """Make a trace that rises from low to high and falls back: eta sin(theta time)**2 + delta, as in section 4.2 of Kimad.

    Args:
        low: Lowest bandwidth in bytes per second.
        high: Highest bandwidth in bytes per second.
        period: Seconds from low to high and back.

    Returns:
        The trace.
    """
    edges = np.linspace(0, math.pi, _CELLS + 1)
    integral = edges / 2 - np.sin(2 * edges) / 4
    return Trace(np.full(_CELLS, period / _CELLS), low + (high - low) * np.diff(integral) / np.diff(edges))


def step(low: float, high: float, period: float) -> Trace:
    """Make a trace that is high for half of the period, and then low.

    Args:
        low: Lower bandwidth in bytes per second.
        high: Higher bandwidth in bytes per second.
        period: Seconds.

    Returns:
        The trace.
    """
    return Trace([period / 2, period / 2], [high, low])


def from_csv(path: str) -> Trace:
    """Read a trace from a CSV file with rows of seconds and Mbit/s.

    A rate holds until the next row's time; the last row's time is the end. Rows at the top that do not begin with a number
    are skipped.

    Args:
        path: The file.

    Returns:
        The trace.

    Raises:
        ConfigError: The rows are not such numbers, or make no trace.
    """
    with open(path, newline="", encoding="utf-8") as file:
        rows = list(itertools.dropwhile(lambda row: not _is_number(row[0]), (row for row in csv.reader(file) if row)))
    try:
        times, rates = np.array([(float(row[0]), float(row[1])) for row in rows]).reshape(-1, 2).T
    except (ValueError, IndexError) as error:
        raise ConfigError(f"{path}: rows of two numbers are needed, seconds and Mbit/s ({error})") from error
    if len(times) < 2:
        raise ConfigError(f"{path}: {len(times)} rows; a trace needs at least 2")
    try:
        return Trace(np.diff(times), rates[:-1] * 1e6 / 8)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def parse(text: str) -> Trace:
    """Make a trace from text.

    Args:
        text: One of SPECS, such as sinusoid:30mbit:330mbit:20s.

    Returns:
        The trace.

    Raises:
        ConfigError: The text is no such trace.
    """
    kind, _, rest = text.partition(":")
    if kind == "csv":
        return from_csv(rest)
    made = {"constant": (constant, 1), "sinusoid": (sinusoid, 2), "step": (step, 2)}
    if kind not in made:
        raise ConfigError(f"trace {text!r}; allowed: {SPECS}")
    make, rates = made[kind]
    fields = rest.split(":")
    try:
        numbers = [bits_per_second(one) / 8 for one in fields[:rates]] + [seconds(one) for one in fields[rates:]]
        return make(*numbers)
    except (ValueError, TypeError) as error:
        raise ConfigError(f"trace {text!r}; allowed: {SPECS}, such as sinusoid:30mbit:330mbit:20s") from error
