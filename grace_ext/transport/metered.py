"""A transport that measures its collectives: how many bytes they send, and when they are under way."""

import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from .base import CollectiveHandle, Transport, TransportWrapper


class MeteredTransport(TransportWrapper):
    """Forwards collectives, and reports each one.

    Args:
        transport: The transport to wrap.
        add: add(sent, started, ended, late), called at the end of each collective, in the thread that notices it: bytes that
            left this rank, seconds of time.perf_counter, and whether it may have ended earlier.
    """

    def __init__(self, transport: Transport, add: Callable):
        super().__init__(transport)
        self._add, self._lock = add, threading.Lock()

    def start_collective(self, kind: str, name: str, array: np.ndarray, *args: Any) -> CollectiveHandle:
        sent, started = self._sent(kind, array, *args), time.perf_counter()

        def ended(ended: float, late: bool) -> None:
            with self._lock:
                self._add(sent, started, ended, late)

        return super().start_collective(kind, name, array, *args).on_end(ended)

    def _sent(self, kind: str, array: np.ndarray, *args: Any) -> float:
        if kind == "allreduce":
            return 2 * array.nbytes * (self.size - 1) / self.size  # a ring
        if kind == "alltoall":
            (splits,) = args
            return array.nbytes - splits[self.rank]
        return array.nbytes * (self.size - 1)
