"""Decides for communicator="auto" in the place of its Chooser, or hurries that one."""

import contextlib
from unittest import mock

import grace_ext.exchange
from grace_ext.policy import choice


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
    return mock.patch.object(grace_ext.exchange, "Chooser", lambda transport, buckets: _Always(way, buckets))


@contextlib.contextmanager
def hurried():
    """A context in which choosing takes few steps, is repeated soon, and gives every plan its trial. Yields the list of the
    plans that were tried."""
    plans_of, tried, plans = choice.plans, choice.Chooser._tried, []
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(choice, "plans", lambda predicted, slack: plans_of(predicted, 1e9)))
        for name, value in {"_SECONDS": 0.01, "_ROUNDS": 1, "_CHECK": 5, "_AGAIN": 10, "_SLOWER": 1e9}.items():
            stack.enter_context(mock.patch.object(choice, name, value))
        stack.enter_context(mock.patch.object(choice.Chooser, "_tried", lambda self: (plans.append(self.plan), tried(self))))
        yield plans
