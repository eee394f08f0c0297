"""Work that a worker thread does in order, and a caller who would wait for it takes over."""

import concurrent.futures
import threading
from types import SimpleNamespace

import numpy as np
import pytest
from support.exchanges import make, step
from support.in_process_ranks import gradient, on_all_ranks

import grace_ext
from grace_ext.exchange import scheduler
from grace_ext.exchange.buckets import Tensor
from grace_ext.exchange.engine import Exchange
from grace_ext.exchange.scheduler import CallersThread, SerialExecutor
from grace_ext.pipeline.spec import parse_stage
from grace_ext.transport import InProcessGroup


class Asleep(concurrent.futures.Executor):
    """A worker that has not got a core: it works when it is told."""

    def __init__(self):
        self._left = []

    def submit(self, work, *args):
        self._left.append(lambda: work(*args))

    def wake(self):
        while self._left:
            self._left.pop(0)()


def test_the_worker_does_it_in_order():
    done, queue = [], SerialExecutor()
    futures = [queue.submit(done.append, number) for number in range(20)]
    for future in futures:
        assert future.result(10) is None
    assert done == list(range(20))
    queue.close()


def test_a_caller_takes_what_the_worker_has_not_begun_first_things_first():
    done, worker = [], Asleep()
    queue = SerialExecutor(worker)
    futures = [queue.submit(lambda number: done.append(number) or number, number) for number in range(3)]
    assert queue.run_next() is futures[0] and futures[0].result(0) == 0 and done == [0]
    worker.wake()
    assert done == [0, 1, 2] and [future.result(0) for future in futures] == [0, 1, 2]
    assert queue.run_next() is None


def test_a_caller_runs_nothing_while_another_works():
    begun, go, queue = threading.Event(), threading.Event(), SerialExecutor()

    def work():
        begun.set()
        return go.wait(10)

    first, second = queue.submit(work), queue.submit(lambda: "second")
    begun.wait(10)
    assert queue.run_next() is None and not second.done()
    go.set()
    assert first.result(10) is True and second.result(10) == "second"
    queue.close()


def test_errors_go_to_the_future_whoever_works():
    worker = Asleep()
    queue = SerialExecutor(worker)
    taken, left = queue.submit(int, "one"), queue.submit(int, "two")
    assert queue.run_next() is taken
    worker.wake()
    for future in (taken, left):
        with pytest.raises(ValueError, match="invalid literal"):
            future.result(0)


def test_what_is_cancelled_is_not_done():
    done, worker = [], Asleep()
    queue = SerialExecutor(worker)
    first, second = (queue.submit(done.append, number) for number in range(2))
    assert first.cancel() and queue.run_next() is first and not done
    worker.wake()
    assert done == [1] and second.done()
    concurrent.futures.wait([first, second], 10)


def test_the_callers_thread_does_it_at_once():
    threads = []
    CallersThread().submit(lambda: threads.append(threading.get_ident()))
    assert threads == [threading.get_ident()]
    assert CallersThread().submit(divmod, 7, 2).result() == (3, 1)
    with pytest.raises(ZeroDivisionError):
        CallersThread().submit(divmod, 7, 0).result()


def test_another_ones_executor_stays_open():
    with concurrent.futures.ThreadPoolExecutor(1) as executor:
        SerialExecutor(executor).close()
        assert executor.submit(int, "7").result(10) == 7


class NeverRuns(concurrent.futures.Executor):
    """A worker that never gets a core."""

    def submit(self, *_):
        pass


@pytest.mark.parametrize("communicator", ["allgather", "sharded"])
def test_a_caller_encodes_what_the_worker_has_not_begun(communicator):
    def work(transport, executor):
        exchange = make(transport, communicator=communicator, executor=executor)
        outs = [step(exchange, gradient(10 * transport.rank + i))[0] for i in range(3)]
        return outs, exchange.stats()

    alone = on_all_ranks(lambda transport: work(transport, NeverRuns()))
    usual = on_all_ranks(lambda transport: work(transport, None))
    for (outs, stats), (expected, _) in zip(alone, usual, strict=True):
        assert np.array_equal(outs, expected)
        encoding = sum(taken for stage, taken in stats["seconds"].items() if stage not in ("exchange", "decode"))
        assert encoding <= stats["exposed_seconds"] <= stats["late_seconds"]


def test_backward_waits_while_much_waits_to_be_encoded(monkeypatch):
    """Where gradients are freed as soon as they are encoded, few of them are there at any time."""
    monkeypatch.setattr(scheduler, "MOST_WAITING", 4 * 3000)
    worker, started = Asleep(), threading.Semaphore(0)
    exchange = Exchange(InProcessGroup(1).transport(0), "residual", 1.0, executor=worker)
    parts = grace_ext.compressor("topk:0.1"), parse_stage("communicator", "allgather")
    exchange.set_buckets([exchange.bucket(name, [Tensor(name, 2000, 2)], *parts) for name in "abc"])
    for bucket in exchange.buckets:
        bucket.lender = SimpleNamespace(out=np.empty(bucket.size, np.float32))

    def backward():
        for bucket in exchange.buckets:
            exchange.wait_for_room()
            exchange.start(bucket, lambda out: np.copyto(out, gradient(0, 2000)))
            started.release()

    thread = threading.Thread(target=backward)
    thread.start()
    assert started.acquire(timeout=10) and started.acquire(timeout=10)  # the third waits: 16,000 bytes are more than 12,000
    assert not started.acquire(timeout=0.2)
    worker.wake()
    assert started.acquire(timeout=10)
    thread.join(10)
    worker.wake()
    for bucket in exchange.buckets:
        exchange.finish(bucket, None)
    assert exchange.end_step()


def test_who_waits_for_room_goes_on_when_the_step_is_given_up(monkeypatch):
    monkeypatch.setattr(scheduler, "MOST_WAITING", 0)
    worker = Asleep()
    exchange = make(InProcessGroup(1).transport(0), executor=worker)
    exchange.start(exchange.buckets[0], lambda out: np.copyto(out, gradient(0)))
    (started,) = exchange._scheduler._started.values()
    assert started.cancel()  # what abort begins with; a worker that is awake then takes it from the queue
    worker.wake()
    thread = threading.Thread(target=exchange.wait_for_room)
    thread.start()
    exchange.abort()
    thread.join(10)
    assert not thread.is_alive()
