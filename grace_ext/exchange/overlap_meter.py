"""How much of the codecs' work steps wait for, because no other work hides it."""

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

from ..communicators.base import Pending
from .buckets import Bucket

Result = TypeVar("Result")


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
        """Start to measure the next step."""
        self.late = self.exposed = 0.0

    def wait_for(self, done: Callable[[], Result]) -> Result:
        """Wait for the worker thread. All of the time counts.

        Args:
            done: The function that waits.

        Returns:
            What the function returns.
        """
        started = time.perf_counter()
        result = done()
        self._add(time.perf_counter() - started)
        return result

    def encoded(self, future: Future) -> None:
        """Count a bucket that the caller has encoded itself, because the worker thread had not begun it.

        Args:
            future: The future of its Pending, done.
        """
        if not future.cancelled() and not future.exception():
            self._add(future.result().codec_seconds)

    def decode(self, decode: Callable, bucket: Bucket, pending: Pending, *args: Any, others: Sequence[Bucket]) -> Any:
        """Decode a bucket and count the time.

        Args:
            decode: decode(bucket, pending, *args).
            bucket: The bucket.
            pending: What it waits for.
            *args: Further arguments of `decode`.
            others: Buckets that have yet to be decoded.

        Returns:
            What `decode` returns.
        """
        before, decoded = pending.codec_seconds, pending.seconds.get("decode", 0.0)
        result = decode(bucket, pending, *args)
        decoded = pending.seconds.get("decode", 0.0) - decoded
        self._add(decoded, others)
        self._add(pending.codec_seconds - before - decoded)
        return result

    def _add(self, seconds: float, others: Sequence[Bucket] = ()) -> None:
        self.late += seconds
        if not any(self._is_on_its_way(bucket.name) for bucket in others):
            self.exposed += seconds
