"""What an exchange counts: bytes, seconds by stage, containers by index codec. See Exchange.stats."""

from collections import Counter

from ..communicators.base import Pending


class Counts:
    """Of the last step under `last`, once there was one."""

    def __init__(self):
        self.bytes = Counter()
        self.seconds = Counter()
        self.index_codecs = Counter()
        self.late = self.exposed = 0.0
        self.last: Counts | None = None

    def add(self, bucket, pending: Pending) -> None:
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
        return {**self._volume("all"), "compressed": self._volume("compressed"), "seconds": dict(self.seconds),
                "late_seconds": self.late, "exposed_seconds": self.exposed, "index_codecs": dict(self.index_codecs)}

    def _volume(self, kind: str) -> dict:
        given, sent = self.bytes[kind, "in"], self.bytes[kind, "out"]
        return {"bytes_in": given, "bytes_out": sent, "ratio": given / sent if sent else 1.0}
