"""How much of the codecs' work a step waits for, because nothing hides it."""

import time
from collections.abc import Callable
from concurrent.futures import Future


class OverlapMeter:
    """Measures one step at a time.

    `late` counts the seconds in which codecs worked while the step waited. `exposed` leaves out what makes no step longer:
    decoding one bucket while another, which has to be decoded as well, is still on its way. Encoding makes a send later, so
    it counts.

    Args:
        is_on_its_way: is_on_its_way(name) tells whether that bucket's collective is known to be under way.
    """

    def __init__(self, is_on_its_way: Callable[[str], bool]):
        self.late = self.exposed = 0.0
        self._is_on_its_way = is_on_its_way

    def reset(self) -> None:
        self.late = self.exposed = 0.0

    def wait(self, done: Callable):
        """Returns done(), which waits for the worker thread. All of it counts."""
        started = time.perf_counter()
        result = done()
        self._add(time.perf_counter() - started)
        return result

    def encoded(self, future: Future) -> None:
        """The caller has encoded this bucket itself, which the worker thread had not begun."""
        if not future.cancelled() and not future.exception():
            self._add(future.result().codec_seconds)

    def decode(self, decode: Callable, bucket, pending, *args, others):
        """Returns decode(bucket, pending, *args). others: buckets that have it yet to come."""
        before, decoded = pending.codec_seconds, pending.seconds.get("decode", 0.0)
        result = decode(bucket, pending, *args)
        decoded = pending.seconds.get("decode", 0.0) - decoded
        self._add(decoded, others)
        self._add(pending.codec_seconds - before - decoded)
        return result

    def _add(self, seconds: float, others=()) -> None:
        self.late += seconds
        if not any(self._is_on_its_way(bucket.name) for bucket in others):
            self.exposed += seconds
