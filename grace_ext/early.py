"""Buckets that have arrived while backward goes on: the thread that encodes decodes them in between."""

import concurrent.futures
import threading
from collections.abc import Callable

from .buckets import Bucket
from .communicators.base import Pending


class Early:
    """Of one step. Nothing here waits for other ranks: only a collective that is known to be over is received."""

    def __init__(self):
        self._lock = threading.Lock()
        self._open: dict[str, tuple] = {}
        self._levels: dict[str, int] = {}
        self._results: dict[str, concurrent.futures.Future] = {}

    def add(self, bucket: Bucket, pending: Pending, out, collectives: int) -> None:
        with self._lock:
            self._open[bucket.name] = bucket, pending, out, collectives

    def work(self, advance: Callable, receive: Callable) -> None:
        """In the worker thread: advance(bucket, pending) or receive(bucket, pending, out) what has arrived, until nothing
        has."""
        while self._round(advance, receive):
            pass

    def _round(self, advance: Callable, receive: Callable) -> int:
        with self._lock:
            arrived = [one for one in self._open.values() if _has_arrived(one[1].handle)]
        for bucket, pending, out, collectives in arrived:
            if self.levels(bucket) < collectives - 1:
                advance(bucket, pending)
                self._levels[bucket.name] = self.levels(bucket) + 1
                continue
            with self._lock:
                if self._open.pop(bucket.name, None) is None:
                    continue  # the caller is at it
                self._results[bucket.name] = future = concurrent.futures.Future()
            try:
                future.set_result(receive(bucket, pending, out))
            except BaseException as error:
                future.set_exception(error)
        return len(arrived)

    def levels(self, bucket: Bucket) -> int:
        """How many times the worker has advanced it. Of use when the worker rests."""
        return self._levels.get(bucket.name, 0)

    def result(self, bucket: Bucket) -> concurrent.futures.Future | None:
        """Of receiving it; None: the caller has to do it, and the worker won't."""
        with self._lock:
            self._open.pop(bucket.name, None)
            return self._results.get(bucket.name)


def _has_arrived(handle) -> bool:
    poll = getattr(handle, "poll", None)
    return poll is not None and poll()
