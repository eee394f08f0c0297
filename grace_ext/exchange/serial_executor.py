"""Who encodes: the worker thread, or whoever would have to wait for it."""

import collections
import concurrent.futures
import threading
from collections.abc import Callable


class Turns:
    """Work for one thread at a time, in the order in which it came, done by a worker thread while others compute.

    A caller who would have to wait can take the worker's place, as far as that one has not begun: where ranks keep all cores
    busy, it may take milliseconds until a sleeping worker gets one, and the caller has one.

    executor: of one thread; one of its own if None.
    """

    def __init__(self, executor: concurrent.futures.Executor | None = None):
        self.executor = executor or concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="grace_ext")
        self._owned = executor is None
        self._turn = threading.Lock()
        self._line: collections.deque[tuple[concurrent.futures.Future, Callable]] = collections.deque()

    def submit(self, work: Callable, *args) -> concurrent.futures.Future:
        future = concurrent.futures.Future()
        self._line.append((future, lambda: work(*args)))
        self.executor.submit(self._next)
        return future

    def take(self) -> concurrent.futures.Future | None:
        """Do what is first in line and return it, which has its result then. None if somebody is at work, or there is
        nothing to do. Not from inside of the work."""
        if not self._turn.acquire(blocking=False):
            return None
        try:
            return self._do_first()
        finally:
            self._turn.release()

    def _next(self) -> None:
        with self._turn:
            self._do_first()  # a caller may have done it

    def _do_first(self) -> concurrent.futures.Future | None:
        if not self._line:
            return None
        future, work = self._line.popleft()
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
