"""A transport that notes when a bucket was sent."""

import time

from .base import Transport, TransportWrapper


class TracingTransport(TransportWrapper):
    """Forwards collectives. `at`: when the first was started, in seconds of time.perf_counter; None before."""

    def __init__(self, transport: Transport):
        super().__init__(transport)
        self.started_at: float | None = None

    def _start(self, kind, name, array, *args):
        self.started_at = self.started_at or time.perf_counter()
        return super()._start(kind, name, array, *args)
