"""Which thread encodes and decodes the buckets of a step, and when."""

import concurrent.futures
from collections.abc import Callable

from ..communicators.base import Pending
from .buckets import Bucket
from .eager_decoder import EagerDecoder
from .overlap_meter import OverlapMeter
from .serial_executor import SerialExecutor


class Scheduler:
    """Sends buckets in a worker thread, in their order, or in that of a caller who would wait for it; decodes them in the
    worker thread when it has nothing to send, or in the caller's.

    Args:
        executor: of the one thread that works while others compute; one of its own if None.
        advance: advance(bucket, pending) starts the next of several collectives.
        receive: receive(bucket, pending, out) decodes; returns whether all ranks' gradients were finite.
        failed: failed(bucket, error), called where a bucket could not be sent.
    """

    def __init__(self, executor: concurrent.futures.Executor | None, advance: Callable, receive: Callable, failed: Callable):
        self._advance, self._receive, self._failed = advance, receive, failed
        self._queue = SerialExecutor(executor)
        self._eager = EagerDecoder(self._queue.executor, advance, receive, lambda: len(self._started) >= self.buckets)
        self._started: dict[str, concurrent.futures.Future] = {}
        self._finished: set[str] = set()
        self._error: BaseException | None = None  # why a bucket of this step could not be sent
        self.buckets = 0  # of a step
        self.overlap = OverlapMeter(self._is_on_its_way)

    @property
    def is_idle(self) -> bool:
        """Whether no bucket of a step has been submitted."""
        return not self._started

    def submit(self, bucket: Bucket, send: Callable[[], Pending], out, collectives: int) -> None:
        """Queue a bucket. out: see Exchange.start. collectives: that it goes through."""
        self._started[bucket.name] = self._queue.submit(self._send, bucket, send, out, collectives)
        self._eager.interrupt()

    def submit_sent(self, bucket: Bucket, pending: Pending) -> None:
        """A bucket that somebody else has sent."""
        self._started[bucket.name] = future = concurrent.futures.Future()
        future.set_result(pending)

    def run(self, work: Callable[..., Pending], *args) -> concurrent.futures.Future:
        """Queue a collective that belongs to no bucket.

        Args:
            work: The function that starts it, for the worker thread.
            *args: Arguments of the function.

        Returns:
            The future of what the function returns.
        """
        return self._queue.submit(work, *args)

    def is_started(self, bucket: Bucket) -> bool:
        return bucket.name in self._started

    def unfinished(self) -> tuple[str, ...]:
        """Names of the buckets that were submitted in this step and are not decoded. For any thread."""
        return tuple(name for name in tuple(self._started) if name not in self._finished)

    def pending(self, bucket: Bucket) -> Pending:
        """Returns when the bucket is sent, by the worker thread, or by this one where that one has not begun."""
        future = self._started[bucket.name]
        while not future.done() and (done := self._queue.run_next()):
            self.overlap.encoded(done)
        return self.overlap.wait(future.result)

    def advance_all(self, collectives: list[tuple[Bucket, int]]) -> None:
        """Start all collectives but the first, level by level. collectives: of a step's buckets, and how many each has."""
        levels = max((count for _, count in collectives), default=1) - 1
        if levels:
            for bucket, _ in collectives:
                self.pending(bucket)  # the worker may be about to do the same
        self._take_over()
        for level in range(levels):
            self._advance_some([bucket for bucket, count in collectives if self._eager.levels(bucket) <= level < count - 1])

    def advance(self, buckets) -> None:
        """Start the next collective of these."""
        self._take_over()
        self._advance_some(buckets)

    def _advance_some(self, buckets) -> None:
        for number, bucket in enumerate(buckets, start=1):
            self.overlap.decode(self._advance, bucket, self.pending(bucket), others=buckets[number:])

    def receive(self, bucket: Bucket, out, others) -> tuple[Pending, bool]:
        """Decode, unless the worker has done it. others: those that may have it yet to come. Raises the worker's errors."""
        pending = self.pending(bucket)
        self._take_over()
        if decoded := self._eager.result(bucket):
            finite = decoded.result()
        else:
            finite = self.overlap.decode(self._receive, bucket, pending, out, others=others)
        self._finished.add(bucket.name)
        return pending, finite

    def _take_over(self) -> None:
        """From here on the caller decodes."""
        self.overlap.wait(self._eager.stop)
        self._check_sent()

    def _send(self, bucket: Bucket, send: Callable[[], Pending], out, collectives: int) -> Pending:
        """In either thread. After an error nothing more of the step is sent: where collectives have no names, as in PyTorch
        DDP, the other ranks would take what comes next for this one."""
        try:
            self._check_sent()
            pending = send()
        except BaseException as error:
            self._error = error
            self._failed(bucket, error)
            raise
        if out is not None:
            self._eager.add(bucket, pending, out, collectives)
        self._eager.poll_arrivals()
        return pending

    def _check_sent(self) -> None:
        if self._error is not None:
            raise self._error

    def _is_on_its_way(self, name: str) -> bool:
        future = self._started.get(name)
        return bool(future and future.done() and not future.exception() and future.result().is_on_its_way())

    def cancel(self) -> None:
        """Of what has been submitted, nothing more is begun. Returns when nothing runs."""
        for future in self._started.values():
            future.cancel()
        concurrent.futures.wait(self._started.values())

    def end_step(self) -> None:
        """Nothing of the step is under way any more."""
        self._eager.end_step()
        self._started.clear()
        self._finished.clear()
        self.overlap.reset()
        self._error = None

    def close(self) -> None:
        """End the worker thread if it is its own."""
        self._queue.close()
