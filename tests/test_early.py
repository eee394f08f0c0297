"""Decoding in between, when the worker has nothing to encode. With real steps: test_fusion.py and tests/mpi."""

import concurrent.futures
from types import SimpleNamespace

from grace_ext.early import Early


class AtOnce(concurrent.futures.Executor):
    def submit(self, work, *args):
        future = concurrent.futures.Future()
        future.set_result(work(*args))
        return future


def test_what_has_to_be_encoded_comes_before_the_next_that_has_arrived():
    received = []

    def receive(bucket, pending, out):
        received.append(bucket.name)
        if bucket.name == "first":
            early.call()
        return True

    early = Early(AtOnce(), None, receive, lambda: False)
    buckets = [SimpleNamespace(name=name) for name in ("first", "second")]
    for bucket in buckets:
        early.add(bucket, SimpleNamespace(handle=SimpleNamespace(poll=lambda: True)), None, 1)
    early.look()
    assert received == ["first"]
    early.look()
    assert received == ["first", "second"]
    assert [early.result(bucket).result(0) for bucket in buckets] == [True, True]
