"""Which thread encodes and decodes the buckets of a step, and when."""

import collections
import concurrent.futures
import threading
from collections.abc import Callable, Sequence
from typing import Any

from ..communicators.base import Pending
from .buckets import Bucket
from .eager_decoder import EagerDecoder
from .overlap_meter import OverlapMeter

#: Bytes of gradients that may wait to be encoded where they are freed once they are, so that they are never there all at once,
#: whatever the speed of backward.
MOST_WAITING = 32 * 2**20


class CallersThread(concurrent.futures.Executor):
    """Runs what is submitted at once, in the caller's thread: for callers that have nothing else to do meanwhile."""

    def submit(self, function: Callable, /, *args: Any, **kwargs: Any) -> concurrent.futures.Future:
        """Run a function.

        Args:
            function: The function.
            *args: Its arguments.
            **kwargs: Its arguments by name.

        Returns:
            The future of what it returns or raises, which is done.
        """
        future: concurrent.futures.Future = concurrent.futures.Future()
        try:
            future.set_result(function(*args, **kwargs))
        except BaseException as error:
            future.set_exception(error)
        return future


class SerialExecutor:
    """Runs one item at a time, in the order of `submit`, in a worker thread; a waiting caller may run the next one itself.

    Where ranks keep all cores busy, it may take milliseconds until a sleeping worker gets a core, and a caller that waits
    has one: so it may run what the worker has not begun.

    Args:
        executor: An executor of one thread; None for one of its own.
    """

    def __init__(self, executor: concurrent.futures.Executor | None = None):
        self.executor = executor or concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="grace_ext")
        self._owned = executor is None
        self._running = threading.Lock()
        self._queue: collections.deque[tuple[concurrent.futures.Future, Callable]] = collections.deque()

    def submit(self, work: Callable, *args: Any) -> concurrent.futures.Future:
        """Queue an item.

        Args:
            work: The function to call.
            *args: Its arguments.

        Returns:
            The future of what the function returns or raises.
        """
        future: concurrent.futures.Future = concurrent.futures.Future()
        self._queue.append((future, lambda: work(*args)))
        self.executor.submit(self._run_in_worker)
        return future

    def run_next(self) -> concurrent.futures.Future | None:
        """Run the first item of the queue in this thread. Must not be called from an item.

        Returns:
            The item's future, which is done; None if an item is being run or there is none.
        """
        if not self._running.acquire(blocking=False):
            return None
        try:
            return self._run_first()
        finally:
            self._running.release()

    def _run_in_worker(self) -> None:
        with self._running:
            self._run_first()  # a caller may have run it

    def _run_first(self) -> concurrent.futures.Future | None:
        if not self._queue:
            return None
        future, work = self._queue.popleft()
        if future.set_running_or_notify_cancel():
            try:
                future.set_result(work())
            except BaseException as error:
                future.set_exception(error)
        return future

    def close(self) -> None:
        """End the worker thread if it is its own."""
        if self._owned:
            self.executor.shutdown()


class Scheduler:
    """Sends and decodes the buckets of one step after another.

    Buckets are sent in the order of `submit`, in the worker thread, or in the thread of a caller that would wait for it.
    They are decoded in the worker thread when it has nothing to send, or in the caller's thread.

    Args:
        executor: An executor of the one thread that works while others compute; None for one of its own.
        advance: advance(bucket, pending) starts the next of several collectives.
        receive: receive(bucket, pending, out) decodes, and returns whether all ranks' gradients were finite.
        failed: failed(bucket, error), called where a bucket could not be sent.
    """

    def __init__(self, executor: concurrent.futures.Executor | None, advance: Callable, receive: Callable, failed: Callable):
        self._advance, self._receive, self._failed = advance, receive, failed
        self._queue = SerialExecutor(executor)
        self._eager = EagerDecoder(self._queue.executor, advance, receive, lambda: len(self._started) >= self.bucket_count)
        self._started: dict[str, concurrent.futures.Future] = {}
        self._finished: set[str] = set()
        self._error: BaseException | None = None  # why a bucket of this step could not be sent
        self._waiting = 0  # bytes of the gradients of buckets that have not begun to be encoded
        self._room = threading.Condition()
        self.bucket_count = 0  # in each step
        self.overlap = OverlapMeter(self._is_on_its_way)

    @property
    def is_idle(self) -> bool:
        """Whether no bucket of a step has been submitted."""
        return not self._started

    def submit(self, bucket: Bucket, send: Callable[[], Pending], out: object, collectives: int) -> None:
        """Queue a bucket.

        Args:
            bucket: The bucket.
            send: The function that encodes and sends it.
            out: See Exchange.start.
            collectives: Number of collectives that the bucket goes through.
        """
        with self._room:
            self._waiting += 4 * bucket.size
        self._started[bucket.name] = self._queue.submit(self._send, bucket, send, out, collectives)
        self._eager.interrupt()

    def submit_sent(self, bucket: Bucket, pending: Pending) -> None:
        """Take a bucket that the caller has sent.

        Args:
            bucket: The bucket.
            pending: What it waits for.
        """
        future: concurrent.futures.Future[Pending] = concurrent.futures.Future()
        self._started[bucket.name] = future
        future.set_result(pending)

    def run_collective(self, work: Callable[..., Pending], *args: Any) -> concurrent.futures.Future:
        """Queue a collective that belongs to no bucket.

        Args:
            work: The function that starts it.
            *args: Its arguments.

        Returns:
            The future of what the function returns.
        """
        return self._queue.submit(work, *args)

    def wait_for_room(self) -> None:
        """Wait while buckets of more than MOST_WAITING bytes together wait to be encoded. Must not be called by the worker."""
        with self._room:
            self._room.wait_for(lambda: self._waiting <= MOST_WAITING)

    def is_started(self, bucket: Bucket) -> bool:
        """Say whether the bucket was submitted in this step.

        Args:
            bucket: The bucket.

        Returns:
            Whether it was.
        """
        return bucket.name in self._started

    def unfinished(self) -> tuple[str, ...]:
        """Name the buckets that were submitted in this step and are not decoded. Any thread may call it.

        Returns:
            Their names, in the order of `submit`.
        """
        return tuple(name for name in tuple(self._started) if name not in self._finished)

    def pending(self, bucket: Bucket) -> Pending:
        """Wait until a bucket is sent, by the worker thread, or by this one where the worker has not begun.

        Args:
            bucket: A bucket that was submitted.

        Returns:
            What the bucket waits for from now on.
        """
        future = self._started[bucket.name]
        while not future.done() and (done := self._queue.run_next()):
            self.overlap.encoded(done)
        return self.overlap.wait_for(future.result)

    def advance_all(self, collectives: list[tuple[Bucket, int]]) -> None:
        """Start all collectives but the first, level by level.

        Args:
            collectives: The buckets of the step, and how many collectives each has.
        """
        levels = max((count for _, count in collectives), default=1) - 1
        if levels:
            for bucket, _ in collectives:
                self.pending(bucket)  # the worker may be about to do the same
        self._take_over()
        for level in range(levels):
            self._advance_some([bucket for bucket, count in collectives if self._eager.levels(bucket) <= level < count - 1])

    def advance(self, buckets: Sequence[Bucket]) -> None:
        """Start the next collective of some buckets.

        Args:
            buckets: The buckets, in the same order on all ranks.
        """
        self._take_over()
        self._advance_some(buckets)

    def _advance_some(self, buckets: Sequence[Bucket]) -> None:
        for number, bucket in enumerate(buckets, start=1):
            self.overlap.decode(self._advance, bucket, self.pending(bucket), others=buckets[number:])

    def receive(self, bucket: Bucket, out: object, others: Sequence[Bucket]) -> tuple[Pending, bool]:
        """Decode a bucket, unless the worker has done it. Raises the worker's errors.

        Args:
            bucket: The bucket.
            out: Where the result is written to.
            others: The buckets that may have yet to be decoded.

        Returns:
            What the bucket waited for, and whether all ranks' gradients were finite.
        """
        pending = self.pending(bucket)
        self._take_over()
        if decoded := self._eager.result(bucket):
            finite = decoded.result()
        else:
            finite = self.overlap.decode(self._receive, bucket, pending, out, others=others)
        self._finished.add(bucket.name)
        return pending, finite

    def _take_over(self) -> None:
        """Decode in the caller's thread from here on."""
        self.overlap.wait_for(self._eager.stop)
        self._check_sent()

    def _send(self, bucket: Bucket, send: Callable[[], Pending], out: object, collectives: int) -> Pending:
        """Encode and send a bucket, in either thread.

        After an error nothing more of the step is sent: where collectives have no names, as in PyTorch DDP, the other ranks
        would take what comes next for this one.
        """
        with self._room:
            self._waiting -= 4 * bucket.size
            self._room.notify_all()
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
        """Begin nothing more of what has been submitted. Returns when nothing runs."""
        for future in self._started.values():
            future.cancel()
        concurrent.futures.wait(self._started.values())

    def end_step(self) -> None:
        """Forget the step: nothing of it is under way any more."""
        self._eager.end_step()
        self._started.clear()
        self._finished.clear()
        self.overlap.reset()
        self._error = None
        with self._room:  # what was cancelled did not begin
            self._waiting = 0
            self._room.notify_all()

    def close(self) -> None:
        """End the worker thread if it is its own."""
        self._queue.close()
