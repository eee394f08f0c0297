"""A transport that measures what its collectives give: bytes, and when they were under way."""

import threading
import time
from collections.abc import Callable

from .base import Transport, TransportWrapper


class MeteredTransport(TransportWrapper):
    """Forwards collectives, and says of each what it sent.

    Args:
        add: add(sent, started, ended, late), called at the end of each, in the thread that sees it: bytes that left this
            rank, seconds of time.perf_counter, and whether it may have ended before anybody looked.
    """

    def __init__(self, transport: Transport, add: Callable):
        super().__init__(transport)
        self._add, self._lock = add, threading.Lock()

    def _start(self, kind, name, array, *args):
        sent, started = self._sent(kind, array, *args), time.perf_counter()

        def ended(ended: float, late: bool) -> None:
            with self._lock:
                self._add(sent, started, ended, late)

        return super()._start(kind, name, array, *args).on_end(ended)

    def _sent(self, kind, array, *args) -> float:
        if kind == "allreduce":
            return 2 * array.nbytes * (self.size - 1) / self.size  # a ring
        if kind == "alltoall":
            (splits,) = args
            return array.nbytes - splits[self.rank]
        return array.nbytes * (self.size - 1)
