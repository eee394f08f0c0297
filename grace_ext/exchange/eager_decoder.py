"""Decodes buckets that have arrived while backward goes on, in the worker thread, when it has nothing to encode."""

import concurrent.futures.thread  # registers its exit function when it is imported; ours has to be called before it
import threading
from collections.abc import Callable

from ..communicators.base import Pending
from .buckets import Bucket

_POLL = 0.001  # seconds between two polls
#: Set when Python exits. An atexit function would come too late: Python waits for the threads of executors first.
_exit = threading.Event()
threading._register_atexit(_exit.set)  # type: ignore[attr-defined]  # as concurrent.futures does; the last function registered is called first


class EagerDecoder:
    """Polls the buckets that were sent, and advances or receives those whose collective is over.

    It never waits for other ranks, and it does not delay the exit of Python: a step that an exception interrupted in the
    middle of backward is never ended.

    Args:
        worker: The executor that encodes, one bucket at a time.
        advance: advance(bucket, pending), for a bucket with more collectives to come.
        receive: receive(bucket, pending, out), for a bucket without.
        is_last: is_last() tells whether the caller has nothing more to do than to wait, and so decodes by itself.
    """

    def __init__(self, worker: concurrent.futures.Executor, advance: Callable, receive: Callable, is_last: Callable):
        self._worker, self._advance, self._receive, self._is_last = worker, advance, receive, is_last
        self._lock = threading.Lock()
        self._sent: dict[str, tuple] = {}  # buckets that were sent and that nobody has begun to receive
        self._levels: dict[str, int] = {}
        self._results: dict[str, concurrent.futures.Future] = {}
        self._interrupted = threading.Event()
        self._polls: list[concurrent.futures.Future] = []
        self._ended = False

    def add(self, bucket: Bucket, pending: Pending, out: object, collectives: int) -> None:
        """Take a bucket that was sent. Called by the thread that encoded it.

        Args:
            bucket: The bucket.
            pending: What it waits for.
            out: Where the result is written to.
            collectives: Number of collectives that the bucket goes through.
        """
        with self._lock:
            self._sent[bucket.name] = bucket, pending, out, collectives

    def poll_arrivals(self) -> None:
        """Poll from now on, after what has been queued for encoding. Called by the thread that encoded the last bucket."""
        if self._sent and not self._is_last():
            self._interrupted.clear()
            self._polls.append(self._worker.submit(self._poll))

    def interrupt(self) -> None:
        """Make the worker stop polling, because there is something to encode."""
        self._interrupted.set()

    def stop(self) -> None:
        """Stop polling: when this returns, the worker thread polls no more. Raises its errors. The worker may call it itself."""
        for poll in self._begun():
            poll.result()

    def end_step(self) -> None:
        """Forget the step's buckets and errors."""
        self._ended = True
        concurrent.futures.wait(self._begun())
        for kept in (self._sent, self._levels, self._results):
            kept.clear()
        self._ended = False

    def _begun(self) -> list[concurrent.futures.Future]:
        """Interrupt polling, and return the polls that have begun. The others are cancelled: they may be queued behind the caller."""
        self._interrupted.set()
        begun = []
        while self._polls:
            poll = self._polls.pop()
            if not poll.cancel():
                begun.append(poll)
        return begun

    def levels(self, bucket: Bucket) -> int:
        """Say how many times the worker has advanced a bucket. To be called after `stop`.

        Args:
            bucket: The bucket.

        Returns:
            The number of times.
        """
        return self._levels.get(bucket.name, 0)

    def result(self, bucket: Bucket) -> concurrent.futures.Future | None:
        """Take over a bucket from the worker.

        Args:
            bucket: The bucket.

        Returns:
            The future of what receiving it gave; None if the caller has to receive it, and the worker will not.
        """
        with self._lock:
            self._sent.pop(bucket.name, None)
            return self._results.get(bucket.name)

    def _poll(self) -> None:
        while self._sent and not (self._ended or self._is_last() or _exit.is_set()):
            found = self._decode_arrived()
            if self._interrupted.is_set():
                return
            if not found:
                self._interrupted.wait(_POLL)

    def _decode_arrived(self) -> int:
        """Decode the buckets that have arrived, and return how many there were."""
        with self._lock:
            arrived = [one for one in self._sent.values() if one[1].has_arrived()]
        for bucket, pending, out, collectives in arrived:
            if self._interrupted.is_set():
                break  # encoding comes first: other ranks wait for what this one sends
            if self.levels(bucket) < collectives - 1:
                self._advance(bucket, pending)
                self._levels[bucket.name] = self.levels(bucket) + 1
                continue
            with self._lock:
                if self._sent.pop(bucket.name, None) is None:
                    continue  # the caller is receiving it
                future: concurrent.futures.Future[bool] = concurrent.futures.Future()
                self._results[bucket.name] = future
            try:
                future.set_result(self._receive(bucket, pending, out))
            except BaseException as error:
                future.set_exception(error)
        return len(arrived)
