"""When a bucket was sent."""

import time

import numpy as np

from grace_ext.transport import InProcessGroup
from grace_ext.transport.tracing import TracingTransport


def test_the_first_collective_counts():
    traced = TracingTransport(InProcessGroup(1).transport(0))
    assert traced.started_at is None
    before = time.perf_counter()
    traced.allgather("a", np.zeros(1, np.uint8)).wait()
    first = traced.started_at
    traced.allreduce("b", np.zeros(1, np.float32)).wait()
    assert before <= first == traced.started_at <= time.perf_counter()
