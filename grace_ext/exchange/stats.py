"""What an exchange counts: bytes, seconds by stage, containers by index codec."""

from collections import Counter

from ..observe.listener import StepListener


class Counts:
    """Of one step, or of many."""

    def __init__(self):
        self.bytes = Counter()
        self.seconds = Counter()
        self.index_codecs = Counter()
        self.late = self.exposed = 0.0

    def add(self, bucket, pending) -> None:
        kinds = ["all"] if bucket.compressor.exact else ["all", "compressed"]
        for kind in kinds:
            self.bytes[kind, "in"] += 4 * bucket.size if pending.gradient_bytes is None else pending.gradient_bytes
            self.bytes[kind, "out"] += pending.wire_bytes
        self.seconds.update(pending.seconds)
        self.index_codecs.update(pending.index_codecs)

    def merge(self, other: "Counts") -> None:
        self.bytes.update(other.bytes)
        self.seconds.update(other.seconds)
        self.late += other.late
        self.exposed += other.exposed
        self.index_codecs.update(other.index_codecs)

    def report(self) -> dict:
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
    """Counts an exchange's steps."""

    def __init__(self):
        self.total, self.last = Counts(), Counts()
        self._step = Counts()  # the one under way

    def add_overlap(self, overlap) -> None:
        """overlap: the OverlapMeter of the step under way, at its end."""
        self._step.late, self._step.exposed = overlap.late, overlap.exposed

    def step_report(self) -> dict:
        """Of the step that ends."""
        return self._step.report()

    def bucket_finished(self, step, bucket, pending):
        self._step.add(bucket, pending)

    def end_step(self, step, finite, report):
        self.total.merge(self._step)
        self.last, self._step = self._step, Counts()

    def abort(self):
        self._step = Counts()


def report(exchanges) -> dict:
    """Totals of several exchanges since the start, and the same for the last step of the last of them under "last_step".

    Returns:
        bytes_in: float32 bytes of the gradients; of gradients that come as rows, those of each row as it came, duplicates
            included, and 8 for its index. bytes_out: payload bytes that this rank handed to collectives, headers and padding
            included. ratio: one by the other. compressed: the same for the buckets that are not plain float32.
        seconds: per stage, those of the worker thread included ("exchange" is what was not hidden behind other work).
        late_seconds: how long codecs worked while steps waited, and not beside backward. exposed_seconds: of these, those in
            which steps waited for nothing else, decoding while another bucket was still on its way left out.
        index_codecs: how many containers each index codec wrote, the ones that `auto` chose under their own names.
        residual_norm_ratio: by tensor, the L2 norm of its residual over that of this rank's gradient, when somebody last
            looked (an observer, or rank 0 after 8, 16, 32, ... steps); None where that is no number.
        ways: with communicator "auto", the next step's strategy of each tensor.
        bandwidth: with schedule "kimad", the bytes per second that this rank's link gives, None before anything is known.
        densities: with that schedule, of the next step, by tensor.
    """
    total = Counts()
    found = {"residual_norm_ratio": {}, "ways": {}, "bandwidth": None, "densities": {}}
    for exchange in exchanges:
        total.merge(exchange.statistics.total)
        found["ways"].update(
            (tensor.name, bucket.communicator.strategy)
            for bucket in exchange.buckets
            if bucket.communicator.switches
            for tensor in bucket.tensors
        )
        for listener in exchange.listeners:
            for key, value in listener.stats().items():
                found[key] = {**found[key], **value} if isinstance(value, dict) else value
    steps = sum(exchange.step for exchange in exchanges)
    return {"steps": steps, **total.report(), "last_step": exchanges[-1].statistics.last.report(), **found}
