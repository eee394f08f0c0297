"""A transport that notes when a bucket was sent."""

import time
from typing import Any

import numpy as np

from .base import CollectiveHandle, Transport, TransportWrapper


class TracingTransport(TransportWrapper):
    """Forwards collectives, and notes when the first one was started.

    `started_at` is the time in seconds of time.perf_counter; None before.

    Args:
        transport: The transport to wrap.
    """

    def __init__(self, transport: Transport):
        super().__init__(transport)
        self.started_at: float | None = None

    def start_collective(self, kind: str, name: str, array: np.ndarray, *args: Any) -> CollectiveHandle:
        self.started_at = self.started_at or time.perf_counter()
        return super().start_collective(kind, name, array, *args)
