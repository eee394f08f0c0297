"""Decides for communicator="auto" in the place of its AutoTuner, or hurries that one."""

import contextlib
from unittest import mock

from grace_ext.exchange import listeners
from grace_ext.observe.listener import StepListener
from grace_ext.policy import auto_tuner


class _Always(StepListener):
    def __init__(self, strategy: str):
        self._strategy, self._buckets = strategy, []

    def buckets_set(self, buckets):
        self._buckets = [bucket for bucket in buckets if bucket.communicator.is_tuned]
        for bucket in self._buckets:
            bucket.communicator.switch_to(self._strategy)

    def end_step(self, step, finite, report):
        for bucket in self._buckets:
            bucket.communicator.end_step(finite)


def always(strategy: str):
    """A context in which buckets that are built have this strategy from their first step on."""
    return mock.patch.object(listeners, "AutoTuner", lambda transport: _Always(strategy))


@contextlib.contextmanager
def hurried():
    """A context in which choosing takes few steps, is repeated soon, and gives every plan its trial. Yields the list of the
    plans that were tried."""
    tuner, plans = auto_tuner.AutoTuner, []
    plans_of, tried = auto_tuner.plans, tuner._end_trial
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(auto_tuner, "plans", lambda predicted, slack: plans_of(predicted, 1e9)))
        for name, value in {"_SECONDS": 0.01, "_ROUNDS": 1, "_CHECK": 5, "_AGAIN": 10, "_SLOWER": 1e9}.items():
            stack.enter_context(mock.patch.object(auto_tuner, name, value))
        stack.enter_context(mock.patch.object(tuner, "_end_trial", lambda self: (plans.append(self.plan), tried(self))))
        yield plans
