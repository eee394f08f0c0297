"""Decides for communicator="auto" in the place of its Chooser, or hurries that one."""

import contextlib
from unittest import mock

from grace_ext.exchange import engine
from grace_ext.policy import auto_tuner


class _Always:
    def __init__(self, way: str, buckets: list):
        self._buckets = buckets
        for bucket in buckets:
            bucket.communicator.take(way)

    def add(self, bucket, pending):
        pass

    def end_step(self, finite):
        for bucket in self._buckets:
            bucket.communicator.end_step(finite)


def always(way: str):
    """A context in which buckets that are built take this way from their first step on."""
    return mock.patch.object(engine, "Chooser", lambda transport, buckets: _Always(way, buckets))


@contextlib.contextmanager
def hurried():
    """A context in which choosing takes few steps, is repeated soon, and gives every plan its trial. Yields the list of the
    plans that were tried."""
    chooser, plans = auto_tuner.Chooser, []
    plans_of, tried = auto_tuner.plans, chooser._tried
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(auto_tuner, "plans", lambda predicted, slack: plans_of(predicted, 1e9)))
        for name, value in {"_SECONDS": 0.01, "_ROUNDS": 1, "_CHECK": 5, "_AGAIN": 10, "_SLOWER": 1e9}.items():
            stack.enter_context(mock.patch.object(auto_tuner, name, value))
        stack.enter_context(mock.patch.object(chooser, "_tried", lambda self: (plans.append(self.plan), tried(self))))
        yield plans
