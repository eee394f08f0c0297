"""The simulator against Algorithm 3 in plain numpy, and the time that a step takes."""

import argparse
import dataclasses

import numpy as np
import pytest

import grace_ext
from grace_ext import ConfigError
from grace_ext.simulate import EF21, FashionMnist, FixedDensity, Kimad, KimadPlus, Quadratic, Setting, simulate, traces
from grace_ext.simulate.command import add_arguments, setting_of
from grace_ext.simulate.policies import Sender

pytestmark = pytest.mark.tier("test")

FAST = traces.constant(1e12)


class Plain:
    """Algorithm 3 with top-k of exact values, in numpy: model, estimates of the model and of each worker's update."""

    def __init__(self, task, workers, rate, up, down):
        self.task, self.rate, self.up, self.down = task, rate, up, down
        self.model, self.told = task.start.copy(), task.start.copy()
        self.estimates = [np.zeros_like(task.start) for _ in range(workers)]

    def _close(self, vector, estimate, density):
        for part in np.split(np.arange(vector.size), np.cumsum(self.task.layers)[:-1]):
            difference = vector[part] - estimate[part]
            largest = np.argsort(-np.abs(difference), kind="stable")[: max(1, round(density * part.size))]
            estimate[part[largest]] += difference[largest]

    def step(self, step):
        self._close(self.model, self.told, self.down)
        for worker, estimate in enumerate(self.estimates):
            self._close(self.task.gradient(self.told, worker, step)[0], estimate, self.up)
        self.model -= self.rate * np.mean(self.estimates, axis=0)


def test_it_is_algorithm_3():
    task = Quadratic(300, 3)
    setting = Setting([FAST] * 2, [FAST] * 2, compute=0.0, steps=25, rate=0.4, compression="topk:0.1/raw/raw")
    losses = [record.loss for record in simulate(task, FixedDensity(0.1, 0.2), setting)]
    plain, expected = Plain(task, 2, 0.4, 0.1, 0.2), []
    for step in range(25):
        before = plain.told.copy()
        plain.step(step)
        assert step == 0 or not np.array_equal(before, plain.told)
        expected.append(task.gradient(plain.told, 0, step)[1])
    np.testing.assert_allclose(losses, expected, rtol=1e-3)
    assert losses[-1] < 0.5 * losses[0]


@pytest.mark.parametrize("steps, evaluations", [(39, 20), (40, 20), (5, 20), (20, 1), (7, 3)])
def test_accuracy_is_measured_no_more_often_than_asked_for(steps, evaluations):
    setting = Setting([FAST], [FAST], compute=0.0, steps=steps, rate=0.1, evaluations=evaluations)
    task = Quadratic(20, 1)
    task.accuracy = lambda model: 1.0
    measured = [record.accuracy is not None for record in simulate(task, FixedDensity(0.5, 0.5), setting)]
    assert 1 <= sum(measured) <= evaluations and measured[-1]


def test_congestion_lengthens_the_way_down_and_shrinks_the_budget(slow):
    task, setting = slow
    setting = dataclasses.replace(setting, up=[traces.constant(1e5)], down=[traces.constant(4e5)], steps=40, measured=False)
    for alpha in (0.0, 1.0, 3.0):
        records = simulate(task, Kimad(0.05), dataclasses.replace(setting, congestion=alpha))
        for record in records:
            assert record.seconds == pytest.approx(alpha * record.down / 4e5 + setting.compute + record.sent / 1e5)
        left = 0.05 - setting.compute
        assert np.mean([record.sent for record in records[5:]]) == pytest.approx(1e5 * left / (1 + alpha), rel=0.05)
        if alpha:
            assert np.mean([record.down for record in records[5:]]) == pytest.approx(4e5 * left / (1 + alpha), rel=0.05)
        else:
            assert records[5].down > sum(task.layers), "more than fits into the time, because it costs none"


def test_after_a_warm_up_estimates_are_what_they_estimate():
    task = Quadratic(300, 3)
    setting = Setting([FAST] * 2, [FAST] * 2, compute=0.0, steps=20, rate=0.4, compression="topk:0.1/raw/raw", warmup=5)
    records = simulate(task, FixedDensity(0.05, 0.05), setting)
    assert [record.density for record in records[:6]] == [1.0] * 5 + [pytest.approx(0.05)]
    assert all(record.error == 0 and record.up > 1200 for record in records[:5])
    exact = [task.start.copy()]
    for _ in range(5):
        exact.append(exact[-1] - np.float32(0.4) * task.gradient(exact[-1], 0, 0)[0])
    np.testing.assert_allclose([record.loss for record in records[:5]], [task._loss(one) for one in exact[:5]], rtol=1e-5)
    cold = simulate(task, FixedDensity(0.05, 0.05), dataclasses.replace(setting, warmup=0))
    assert records[5].error < 0.1 * cold[0].error, "the first update is a small change of the one before"


def test_layers_have_rates_of_their_own():
    task = Quadratic(300, 3)
    setting = Setting([FAST], [FAST], compute=0.0, steps=2, rate=0.1, warmup=1, layer_rates=(1.0, 0.0, 5.0))
    task.accuracy = lambda model: seen.append(model.copy())
    seen = []
    simulate(task, FixedDensity(1, 1), setting)
    moved = task.start - seen[0]
    gradient, _ = task.gradient(task.start, 0, 0)
    np.testing.assert_allclose(moved, 0.1 * gradient * np.repeat([1, 0, 5], 100), rtol=1e-4, atol=1e-7)
    with pytest.raises(ConfigError, match="layer_rates has 2 factors; the task has 3 layers"):
        simulate(task, FixedDensity(1, 1), dataclasses.replace(setting, layer_rates=(1.0, 2.0)))


def test_a_steps_time_is_what_its_transfers_take(slow):
    task, setting = slow
    setting = dataclasses.replace(
        setting, up=[traces.constant(1e5), traces.constant(2e5)], down=[traces.constant(4e5), traces.constant(1e6)], steps=5
    )
    now = 0.0
    for record in simulate(task, FixedDensity(0.05, 0.05), setting):
        assert record.start == pytest.approx(now)
        slowest = record.down / 4e5 + 0.02 + record.sent / 1e5
        assert record.seconds == pytest.approx(slowest) and record.bandwidth == 1e5
        now += record.seconds


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: FixedDensity(0.0, 0.1), "density=0.0; allowed"),
        (lambda: Kimad(0.0), "seconds=0.0; allowed"),
        (lambda: KimadPlus(float("nan")), "seconds=nan; allowed"),
        (lambda: Quadratic(3, 4), "4 layers of 3"),
        (lambda: Setting([FAST], [], 0.1, 1, 0.1), "1 traces up, 0 down"),
        (lambda: Setting([FAST], [FAST], 0.1, 0, 0.1), "steps=0; allowed"),
        (lambda: Setting([FAST], [FAST], float("nan"), 1, 0.1), "compute=nan; allowed"),
        (lambda: Setting([FAST], [FAST], 0.1, 1, 0.1, congestion=-1), "congestion=-1; allowed"),
        (lambda: Setting([FAST], [FAST], 0.1, 1, 0.1, warmup=-1), "warmup=-1; allowed"),
        (lambda: FashionMnist("/nowhere"), "there is no /nowhere"),
        (
            lambda: simulate(Quadratic(), FixedDensity(1, 1), Setting([FAST], [FAST], 0, 1, 0.1, compression="dense/raw")),
            "no density",
        ),
        (lambda: Sender(grace_ext.compressor("powersgd:4"), [10]), "no density"),
    ],
)
def test_mistakes(make, message):
    with pytest.raises(ConfigError, match=message):
        make()


def test_the_former_name_is_the_same_policy():
    assert EF21 is FixedDensity and EF21.label == "EF21"


def test_the_first_workers_links_do_not_depend_on_how_many_there_are():
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    arguments = parser.parse_args(["--noise", "0.2", "--phases"])
    two, four = setting_of(2, arguments), setting_of(4, arguments)
    assert [trace.rate(0.3) for trace in four.up[:2]] == [trace.rate(0.3) for trace in two.up]
    assert len({trace.rate(0.3) for trace in four.up + four.down}) == 8
