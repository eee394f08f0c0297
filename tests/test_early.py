"""Decoding in between, when the worker has nothing to encode. With real steps: test_fusion.py and tests/mpi."""

import concurrent.futures
import subprocess
import sys
from types import SimpleNamespace

import pytest

from grace_ext import ContainerError
from grace_ext.communicators.base import Pending, wait
from grace_ext.exchange.eager_decoder import Early


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
        early.add(bucket, Pending(SimpleNamespace(poll=lambda: True), 0, {}), None, 1)
    early.look()
    assert received == ["first"]
    early.look()
    assert received == ["first", "second"]
    assert [early.result(bucket).result(0) for bucket in buckets] == [True, True]


class Once:
    """A handle like Horovod's, which is gone once it was waited for."""

    gone = False

    def poll(self):
        assert not self.gone
        return True

    def wait(self):
        assert not self.gone
        self.gone = True


def test_a_bucket_whose_second_collective_is_left_out_is_received_too():
    """As that of PowerSGD before its `start`, which sends no second factors."""
    early = Early(AtOnce(), lambda bucket, pending: wait(pending), lambda *_: True, lambda: False)
    bucket = SimpleNamespace(name="bucket")
    early.add(bucket, Pending(Once(), 0, {}), None, 2)
    early.look()
    assert early.levels(bucket) == 1
    assert early.result(bucket).result(0) is True


def test_an_error_while_receiving_is_raised_to_who_asks_for_the_result():
    def receive(*_):
        raise ContainerError("damaged")

    early = Early(AtOnce(), None, receive, lambda: False)
    bucket = SimpleNamespace(name="bucket")
    early.add(bucket, Pending(SimpleNamespace(poll=lambda: True), 0, {}), None, 1)
    early.look()
    with pytest.raises(ContainerError, match="damaged"):
        early.result(bucket).result(0)


def test_a_step_that_is_broken_off_does_not_keep_python_from_its_end():
    script = """
import concurrent.futures
from types import SimpleNamespace
from grace_ext.communicators.base import Pending
from grace_ext.early import Early

early = Early(concurrent.futures.ThreadPoolExecutor(1), None, None, lambda: False)
early.add(SimpleNamespace(name="bucket"), Pending(SimpleNamespace(poll=lambda: False), 0, {}), None, 1)
early.look()
raise RuntimeError("backward gives up")
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=300)
    assert done.returncode == 1 and "backward gives up" in done.stderr
