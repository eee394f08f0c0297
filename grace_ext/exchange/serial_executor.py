"""A serial work queue: a worker thread runs its items in order, and a caller that waits may run the next one itself."""

import collections
import concurrent.futures
import threading
from collections.abc import Callable


class SerialExecutor:
    """Runs one item at a time, in the order of `submit`.

    Where ranks keep all cores busy it may take milliseconds until a sleeping worker gets one, and a caller that waits has
    one: so it may run what the worker has not begun.

    Args:
        executor: of one thread; one of its own if None.
    """

    def __init__(self, executor: concurrent.futures.Executor | None = None):
        self.executor = executor or concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="grace_ext")
        self._owned = executor is None
        self._running = threading.Lock()
        self._queue: collections.deque[tuple[concurrent.futures.Future, Callable]] = collections.deque()

    def submit(self, work: Callable, *args) -> concurrent.futures.Future:
        future = concurrent.futures.Future()
        self._queue.append((future, lambda: work(*args)))
        self.executor.submit(self._run_in_worker)
        return future

    def run_next(self) -> concurrent.futures.Future | None:
        """Run the first item of the queue in this thread and return it, which has its result then. None if an item is being
        run or there is none. Not to be called from an item."""
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
