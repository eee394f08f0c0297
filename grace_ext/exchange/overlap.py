"""Codecs' work that a step waits for, because nothing hides it."""

import time
from collections.abc import Callable
from concurrent.futures import Future


class Late:
    """Of one step. started: the Pendings of its buckets, by name, as the exchange keeps them.

    seconds: of codecs that worked while the step waited. exposed: the same without what makes no step longer: decoding one
    bucket while another, which has to be decoded as well, is still on its way. Encoding makes a send later and counts.
    """

    def __init__(self, started: dict[str, Future]):
        self.seconds = self.exposed = 0.0
        self._started = started

    def wait(self, done: Callable):
        """The result of done(), which returns when the worker thread is through. All of the waiting counts."""
        started = time.perf_counter()
        result = done()
        self._add(time.perf_counter() - started)
        return result

    def did(self, future: Future) -> None:
        """The caller has encoded this bucket itself, which the worker thread had not begun."""
        if not future.cancelled() and not future.exception():
            self._add(getattr(future.result(), "codec_seconds", 0.0))  # 0 for a collective without a codec

    def do(self, decode: Callable, bucket, pending, *args, others):
        """The result of decode(bucket, pending, *args). others: buckets that have it yet to come."""
        before, decoded = pending.codec_seconds, pending.seconds.get("decode", 0.0)
        result = decode(bucket, pending, *args)
        decoded = pending.seconds.get("decode", 0.0) - decoded
        self._add(decoded, others)
        self._add(pending.codec_seconds - before - decoded)
        return result

    def _add(self, seconds: float, others=()) -> None:
        self.seconds += seconds
        if not any(self._is_on_its_way(bucket.name) for bucket in others):
            self.exposed += seconds

    def _is_on_its_way(self, name: str) -> bool:
        future = self._started.get(name)
        return bool(future and future.done() and not future.exception() and future.result().is_on_its_way())
