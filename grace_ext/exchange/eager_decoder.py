"""Buckets that have arrived while backward goes on: the worker that encodes decodes them in between."""

import concurrent.futures.thread  # whose own part of Python's exit, registered with the import, has to come after ours
import threading
from collections.abc import Callable

from ..communicators.base import Pending
from .buckets import Bucket

_NAP = 0.001  # seconds between two looks at what has arrived
#: Python ends. It waits for the threads of executors before it calls what is registered with atexit.
_exit = threading.Event()
threading._register_atexit(_exit.set)  # as concurrent.futures does; the last to register is the first to be called


class Early:
    """Of one step. Nothing here waits for other ranks: only a collective that is known to be over is received. And nothing
    keeps Python from its end: a step that an exception broke off in the middle of backward is never ended.

    worker: the executor that encodes, one bucket at a time. advance(bucket, pending) and receive(bucket, pending, out): what
    to do with those that have arrived. is_last(): whether the caller has nothing more to do than to wait.
    """

    def __init__(self, worker: concurrent.futures.Executor, advance: Callable, receive: Callable, is_last: Callable):
        self._worker, self._advance, self._receive, self._is_last = worker, advance, receive, is_last
        self._lock = threading.Lock()
        self._open: dict[str, tuple] = {}
        self._levels: dict[str, int] = {}
        self._results: dict[str, concurrent.futures.Future] = {}
        self._call = threading.Event()
        self._looks: list[concurrent.futures.Future] = []
        self._ended = False

    def add(self, bucket: Bucket, pending: Pending, out, collectives: int) -> None:
        """By the thread that encoded it: this one was sent."""
        with self._lock:
            self._open[bucket.name] = bucket, pending, out, collectives

    def look(self) -> None:
        """By the thread that encoded the last: when there is nothing to encode, let the worker look for what has arrived."""
        if self._open and not self._is_last():
            self._call.clear()  # buckets that were started before come before the look
            self._looks.append(self._worker.submit(self._watch))

    def call(self) -> None:
        """There is something to encode."""
        self._call.set()

    def rest(self) -> None:
        """When it returns, the worker thread looks no more. Its errors surface here."""
        self._call.set()
        while self._looks:
            self._looks.pop().result()

    def end(self) -> None:
        """With the step: nothing of it is looked for any more. Errors are forgotten."""
        self._ended = True
        self._call.set()
        concurrent.futures.wait(list(self._looks))

    def _watch(self) -> None:
        while self._open and not (self._ended or self._is_last() or _exit.is_set()):
            found = self._work()
            if self._call.is_set():
                return
            if not found:
                self._call.wait(_NAP)

    def _work(self) -> int:
        """On what has arrived; returns how many have."""
        with self._lock:
            arrived = [one for one in self._open.values() if one[1].has_arrived()]
        for bucket, pending, out, collectives in arrived:
            if self._call.is_set():
                break  # others wait for what is encoded
            if self.levels(bucket) < collectives - 1:
                self._advance(bucket, pending)
                self._levels[bucket.name] = self.levels(bucket) + 1
                continue
            with self._lock:
                if self._open.pop(bucket.name, None) is None:
                    continue  # the caller is at it
                self._results[bucket.name] = future = concurrent.futures.Future()
            try:
                future.set_result(self._receive(bucket, pending, out))
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
