"""Decoding in between, when the worker has nothing to encode. With real steps: test_fusion.py and tests/adapters."""

import concurrent.futures
import queue
import subprocess
import sys
import threading
from types import SimpleNamespace

import pytest

from grace_ext import ContainerError
from grace_ext.communicators.base import Pending, wait
from grace_ext.exchange.eager_decoder import EagerDecoder
from grace_ext.transport import CollectiveHandle


class AtOnce(concurrent.futures.Executor):
    def submit(self, work, *args):
        future = concurrent.futures.Future()
        future.set_result(work(*args))
        return future


class DaemonThread(concurrent.futures.Executor):
    """One thread, for which Python does not wait when a test leaves it blocked."""

    def __init__(self):
        self._queue = queue.SimpleQueue()
        threading.Thread(target=self._run, daemon=True).start()

    def submit(self, work, *args):
        future = concurrent.futures.Future()
        self._queue.put((future, work, args))
        return future

    def _run(self):
        while True:
            future, work, args = self._queue.get()
            if future.set_running_or_notify_cancel():
                future.set_result(work(*args))


def test_what_has_to_be_encoded_comes_before_the_next_that_has_arrived():
    received = []

    def receive(bucket, pending, out):
        received.append(bucket.name)
        if bucket.name == "first":
            decoder.interrupt()
        return True

    decoder = EagerDecoder(AtOnce(), None, receive, lambda: False)
    buckets = [SimpleNamespace(name=name) for name in ("first", "second")]
    for bucket in buckets:
        decoder.add(bucket, Pending(SimpleNamespace(poll=lambda: True), 0, {}), None, 1)
    decoder.poll_arrivals()
    assert received == ["first"]
    decoder.poll_arrivals()
    assert received == ["first", "second"]
    assert [decoder.result(bucket).result(0) for bucket in buckets] == [True, True]


@pytest.mark.parametrize("end", ["stop", "end_step"])
def test_the_worker_itself_can_stop_a_poll_that_is_queued_behind_what_it_does(end):
    """As in DDP, where the worker ends the step. It waited for its own queue."""
    worker = DaemonThread()
    decoder = EagerDecoder(worker, None, lambda *_: True, lambda: False)
    ended, queued = concurrent.futures.Future(), concurrent.futures.Future()

    def encode():
        queued.result()
        decoder.add(SimpleNamespace(name="bucket"), Pending(SimpleNamespace(poll=lambda: False), 0, {}), None, 1)
        decoder.poll_arrivals()

    def end_step():
        getattr(decoder, end)()
        ended.set_result(True)

    worker.submit(encode)
    worker.submit(end_step)
    queued.set_result(None)
    assert ended.result(10)


def once():
    """A handle like Horovod's, which is gone once it was waited for."""
    left = [True]
    return CollectiveHandle(left.pop, lambda: left[0])


def test_a_bucket_whose_second_collective_is_left_out_is_received_too():
    """As that of PowerSGD before its `start`, which sends no second factors."""
    decoder = EagerDecoder(AtOnce(), lambda bucket, pending: wait(pending), lambda *_: True, lambda: False)
    bucket = SimpleNamespace(name="bucket")
    decoder.add(bucket, Pending(once(), 0, {}), None, 2)
    decoder.poll_arrivals()
    assert decoder.levels(bucket) == 1
    assert decoder.result(bucket).result(0) is True


def test_an_error_while_receiving_is_raised_to_who_asks_for_the_result():
    def receive(*_):
        raise ContainerError("damaged")

    decoder = EagerDecoder(AtOnce(), None, receive, lambda: False)
    bucket = SimpleNamespace(name="bucket")
    decoder.add(bucket, Pending(SimpleNamespace(poll=lambda: True), 0, {}), None, 1)
    decoder.poll_arrivals()
    with pytest.raises(ContainerError, match="damaged"):
        decoder.result(bucket).result(0)


def test_a_step_that_is_broken_off_does_not_keep_python_from_its_end():
    script = """
import concurrent.futures
from types import SimpleNamespace
from grace_ext.communicators.base import Pending
from grace_ext.exchange.eager_decoder import EagerDecoder

decoder = EagerDecoder(concurrent.futures.ThreadPoolExecutor(1), None, None, lambda: False)
decoder.add(SimpleNamespace(name="bucket"), Pending(SimpleNamespace(poll=lambda: False), 0, {}), None, 1)
decoder.poll_arrivals()
raise RuntimeError("backward gives up")
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=300)
    assert done.returncode == 1 and "backward gives up" in done.stderr
