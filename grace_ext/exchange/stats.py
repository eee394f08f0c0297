"""What an exchange counts: bytes, seconds by stage, containers by index codec."""

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from ..communicators.base import Pending
from ..observe.listener import BucketView, StepListener
from .buckets import Bucket
from .overlap_meter import OverlapMeter


class Counts:
    """Totals of one step, or of many."""

    def __init__(self) -> None:
        self.bytes: Counter[tuple[str, str]] = Counter()
        self.seconds: Counter[str] = Counter()
        self.index_codecs: Counter[str] = Counter()
        self.late = self.exposed = 0.0

    def add(self, bucket: BucketView, pending: Pending) -> None:
        """Count a bucket that is finished.

        Args:
            bucket: The bucket.
            pending: What it waited for.
        """
        kinds = ["all"] if bucket.compressor.exact else ["all", "compressed"]
        for kind in kinds:
            self.bytes[kind, "in"] += 4 * bucket.size if pending.gradient_bytes is None else pending.gradient_bytes
            self.bytes[kind, "out"] += pending.wire_bytes
        self.seconds.update(pending.seconds)
        self.index_codecs.update(pending.index_codecs)

    def merge(self, other: "Counts") -> None:
        """Add other counts.

        Args:
            other: The counts to add.
        """
        self.bytes.update(other.bytes)
        self.seconds.update(other.seconds)
        self.late += other.late
        self.exposed += other.exposed
        self.index_codecs.update(other.index_codecs)

    def report(self) -> dict:
        """Report the totals.

        Returns:
            bytes_in, bytes_out, ratio, compressed, seconds, late_seconds, exposed_seconds and index_codecs; see `report`.
        """
        return {
            **self._volume("all"),
            "compressed": self._volume("compressed"),
            "seconds": dict(self.seconds),
            "late_seconds": self.late,
            "exposed_seconds": self.exposed,
            "index_codecs": dict(self.index_codecs),
        }

    def _volume(self, kind: str) -> dict:
        given, sent = self.bytes[kind, "in"], self.bytes[kind, "out"]
        return {"bytes_in": given, "bytes_out": sent, "ratio": given / sent if sent else 1.0}


class Statistics(StepListener):
    """Counts the steps of an exchange."""

    def __init__(self) -> None:
        self.total, self.last = Counts(), Counts()
        self._step = Counts()  # of the step under way
        #: Number of steps that have ended.
        self.steps = 0

    def add_overlap(self, overlap: OverlapMeter) -> None:
        """Take over what was measured of the step, at its end.

        Args:
            overlap: The OverlapMeter of the step.
        """
        self._step.late, self._step.exposed = overlap.late, overlap.exposed

    def step_report(self) -> dict:
        """Report the step that ends.

        Returns:
            See Counts.report.
        """
        return self._step.report()

    def bucket_finished(self, step: int, bucket: BucketView, pending: Pending) -> None:
        self._step.add(bucket, pending)

    def end_step(self, step: int, finite: bool, report: Callable[[], dict]) -> None:
        self.total.merge(self._step)
        self.steps += 1
        self.last, self._step = self._step, Counts()

    def abort(self) -> None:
        self._step = Counts()


class Counted(Protocol):
    """What is reported of an exchange, which is an ExchangeSetup."""

    buckets: list[Bucket]
    statistics: Statistics

    @property
    def listeners(self) -> Sequence[StepListener]:
        """The listeners, in the order in which they hear of an event."""


def report(exchanges: Sequence[Counted], earlier: Sequence[Statistics] = ()) -> dict:
    """Report the totals of several exchanges since the start, and those of the last step.

    - steps: Number of steps since the start; those before a loaded checkpoint are not in it, nor in the other totals.
    - last_step: What Counts.report gives of the last exchange's last step.
    - bytes_in: float32 bytes of the gradients; of gradients that come as rows, those of each row as it came, duplicates
      included, and 8 for its index.
    - bytes_out: Payload bytes that this rank handed to collectives, headers and padding included.
    - ratio: bytes_in / bytes_out.
    - compressed: The same for the buckets that are not plain float32.
    - seconds: By stage, those of the worker thread included; "exchange" is what was not hidden behind other work.
    - late_seconds: Codec time not overlapped with backward: how long codecs worked while steps waited.
    - exposed_seconds: The part of late_seconds in which steps waited for nothing else; decoding while another bucket was
      still on its way is left out.
    - index_codecs: How many containers each index codec wrote, the ones that `auto` chose under their own names.
    - residual_norm_ratio: By tensor, the L2 norm of its residual over that of this rank's gradient, when an observer last
      looked, or rank 0 after 8, 16, 32, ... steps; None where that is no number.
    - ways: With communicator "auto", and memories that have exact steps, the strategy of each tensor in the next step.
    - bandwidth: With schedule "kimad", the bytes per second that this rank's link gives; None before anything is known.
    - densities: With that schedule and "guarded", the density of each tensor in the next step.
    - lag: With schedule "guarded", the energy of all ranks' residuals over that of their gradients when it was last measured.

    Args:
        exchanges: The exchanges, the current one last.
        earlier: The statistics of exchanges that these have replaced.

    Returns:
        The fields above, by name.
    """
    total, steps = Counts(), 0
    for statistics in (*earlier, *(exchange.statistics for exchange in exchanges)):
        total.merge(statistics.total)
        steps += statistics.steps
    found: dict[str, Any] = {"residual_norm_ratio": {}, "ways": {}, "bandwidth": None, "densities": {}, "lag": None}
    for exchange in exchanges:
        found["ways"].update(
            (tensor.name, bucket.communicator.strategy)
            for bucket in exchange.buckets
            if bucket.communicator.switches
            for tensor in bucket.tensors
        )
        for listener in exchange.listeners:
            for key, value in listener.stats().items():
                found[key] = {**found[key], **value} if isinstance(value, dict) else value
    return {"steps": steps, **total.report(), "last_step": exchanges[-1].statistics.last.report(), **found}
