"""Work that a worker thread does in order, and a caller who would wait for it takes over."""

import concurrent.futures
import threading

import pytest

from grace_ext.exchange.serial_executor import Turns


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
    done, turns = [], Turns()
    futures = [turns.submit(done.append, number) for number in range(20)]
    for future in futures:
        assert future.result(10) is None
    assert done == list(range(20))
    turns.close()


def test_a_caller_takes_what_the_worker_has_not_begun_first_things_first():
    done, worker = [], Asleep()
    turns = Turns(worker)
    futures = [turns.submit(lambda number: done.append(number) or number, number) for number in range(3)]
    assert turns.take() is futures[0] and futures[0].result(0) == 0 and done == [0]
    worker.wake()
    assert done == [0, 1, 2] and [future.result(0) for future in futures] == [0, 1, 2]
    assert turns.take() is None


def test_nobody_takes_a_turn_while_another_works():
    begun, go, turns = threading.Event(), threading.Event(), Turns()

    def work():
        begun.set()
        return go.wait(10)

    first, second = turns.submit(work), turns.submit(lambda: "second")
    begun.wait(10)
    assert turns.take() is None and not second.done()
    go.set()
    assert first.result(10) is True and second.result(10) == "second"
    turns.close()


def test_errors_go_to_the_future_whoever_works():
    worker = Asleep()
    turns = Turns(worker)
    taken, left = turns.submit(int, "one"), turns.submit(int, "two")
    assert turns.take() is taken
    worker.wake()
    for future in (taken, left):
        with pytest.raises(ValueError, match="invalid literal"):
            future.result(0)


def test_what_is_cancelled_is_not_done():
    done, worker = [], Asleep()
    turns = Turns(worker)
    first, second = (turns.submit(done.append, number) for number in range(2))
    assert first.cancel() and turns.take() is first and not done
    worker.wake()
    assert done == [1] and second.done()
    concurrent.futures.wait([first, second], 10)


def test_another_ones_executor_stays_open():
    with concurrent.futures.ThreadPoolExecutor(1) as executor:
        Turns(executor).close()
        assert executor.submit(int, "7").result(10) == 7
