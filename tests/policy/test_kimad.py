"""Kimad on a link whose time is simulated: the step takes what the schedule says, whatever the link gives."""

import time

import numpy as np
import pytest
from support.in_process_ranks import gradient, on_all_ranks

import grace_ext
from grace_ext import ConfigError
from grace_ext.exchange.buckets import Tensor
from grace_ext.exchange.engine import Exchange
from grace_ext.pipeline.spec import parse_stage
from grace_ext.policy.allocation import DENSITIES
from grace_ext.policy.kimad import uniform_density
from grace_ext.transport import CollectiveHandle, Transport
from grace_ext.transport.metered import MeteredTransport

D = 200_000
SPEC = "topk:0.01/rice/qsgd:7"


class Clock:
    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock(monkeypatch):
    found = Clock()
    monkeypatch.setattr(time, "perf_counter", found)
    return found


class Link(Transport):
    """To one other rank, which sends what this one does. rate: bytes per second; delay: seconds of every collective."""

    rank, size, hosts = 0, 2, (0, 1)

    def __init__(self, clock, rate, delay=0.0):
        self.clock, self.rate, self.delay, self._free = clock, rate, delay, 0.0

    def allgather(self, name, payload):
        self._free = max(self._free, self.clock.now) + self.delay + payload.size / self.rate
        return arriving(self.clock, self._free, np.concatenate([payload, payload]))

    def allreduce(self, name, array):
        self._free = max(self._free, self.clock.now) + self.delay + array.nbytes / self.rate
        return arriving(self.clock, self._free, array * 2)


def arriving(clock, at, result):
    def wait():
        clock.now = max(clock.now, at)
        return result

    return CollectiveHandle(wait, lambda: clock.now >= at)


class Training:
    """One rank. scales: of the gradients of each bucket."""

    def __init__(self, link, schedule, scales=(1.0,), spec=SPEC, communicator="allgather", **options):
        self.clock = link.clock
        self.exchange = Exchange(link, "residual", 0.5, schedule={"density": schedule}, **options)
        self._scales = scales
        self.exchange.set_buckets(
            [
                self.exchange.bucket(
                    f"b{i}", [Tensor(f"t{i}", D, 2)], grace_ext.compressor(spec), parse_stage("communicator", communicator)
                )
                for i in range(len(scales))
            ]
        )
        self._step = 0

    def step(self, compute=0.1, hidden=0.0, change=lambda given: given):
        """Seconds that it takes; hidden: of them pass after all buckets have been sent."""
        began = self.clock.now
        self.clock.now += compute - hidden
        self._step += 1
        for i, (bucket, scale) in enumerate(zip(self.exchange.buckets, self._scales, strict=True)):
            given = change(np.float32(scale) * gradient(97 * self._step + i, D))
            self.exchange.start(bucket, lambda out, given=given: np.copyto(out, given))
            self.exchange.pending(bucket)
        self.clock.now += hidden
        for bucket in self.exchange.buckets:
            self.exchange.finish(bucket, np.empty(D, np.float32))
        self.exchange.end_step()
        return self.clock.now - began

    def densities(self):
        return list(self.exchange.stats()["densities"].values())


@pytest.mark.parametrize("kind", ["kimad", "kimad+"])
@pytest.mark.parametrize("rate, delay", [(20e3, 0.0), (200e3, 0.0), (2e6, 0.0), (200e3, 0.05)])
def test_steps_take_the_time_that_they_are_given(clock, kind, rate, delay):
    training = Training(Link(clock, rate, delay), f"{kind}:0.3", scales=(1.0, 0.1))
    taken = [training.step() for _ in range(20)]
    np.testing.assert_allclose(taken[-8:], 0.3, rtol=0.12)


def test_it_follows_a_link_that_changes(clock):
    link = Link(clock, 1e6)
    training = Training(link, "kimad:0.3:window=3")
    for rate in (1e6, 50e3, 400e3):
        link.rate = rate
        taken = [training.step() for _ in range(12)]
        np.testing.assert_allclose(taken[-4:], 0.3, rtol=0.12)
        assert training.exchange.stats()["bandwidth"] == pytest.approx(rate, rel=0.05)


def test_a_step_that_was_disturbed_changes_little(clock):
    training = Training(Link(clock, 200e3), "kimad:0.3")
    for _ in range(10):
        training.step()
    before = training.densities()
    training.exchange.transport._transport.delay = 3.0
    training.step()
    training.exchange.transport._transport.delay = 0.0
    training.step(compute=2.0)
    np.testing.assert_allclose(training.densities(), before, rtol=0.1)


def test_the_density_grows_while_the_exchange_hides_behind_backward(clock):
    """Nobody waits for the link, so nobody knows how fast it is."""
    link = Link(clock, 20e3)
    training = Training(link, "kimad:0.3")
    for _ in range(5):
        training.step()
    assert training.densities()[0] < 0.05
    link.rate = 1e9
    for _ in range(60):
        training.step(hidden=0.05)
    assert training.densities()[0] > 0.5


def test_a_prior_counts_before_the_first_step_is_measured(clock):
    training = Training(Link(clock, 20e3), "kimad:0.3:prior=20000")
    assert training.exchange.stats()["bandwidth"] == 20_000
    assert training.exchange.stats()["densities"] == {}


def test_no_time_left_means_the_smallest_density(clock):
    training = Training(Link(clock, 200e3), "kimad:0.05")
    for _ in range(3):
        training.step(compute=0.1)
    assert training.densities() == [DENSITIES[0]]


def test_kimad_plus_gives_more_to_larger_gradients(clock):
    plain, plus = (Training(Link(clock, 300e3), f"{kind}:0.3", scales=(1.0, 0.05, 0.01)) for kind in ("kimad", "kimad+"))
    for training in (plain, plus):
        for _ in range(25):
            taken = training.step()
        assert taken == pytest.approx(0.3, rel=0.12)
    assert len(set(plain.densities())) == 1
    largest, middle, smallest = plus.densities()
    assert largest > 3 * middle and middle >= smallest

    def left(training):
        return sum(np.square(state, dtype=np.float64).sum() for state in training.exchange.state_dict()["residual"].values())

    assert left(plus) < 0.9 * left(plain)


def test_a_gradient_that_is_not_finite_changes_nothing(clock):
    training = Training(Link(clock, 300e3), "kimad+:0.3", scales=(1.0, 0.1))
    for _ in range(10):  # the next step looks at the gradients
        training.step()
    before = training.densities()
    training.step(change=lambda given: given * np.float32(np.nan))
    assert training.densities() == before
    training.step()


def test_new_buckets_are_looked_at_in_their_first_step(clock):
    """DDP makes its buckets anew after the first step, long before the curves would be measured again."""
    training = Training(Link(clock, 300e3), "kimad+:0.3", scales=(1.0, 0.1))
    for _ in range(3):
        training.step()
    assert len(set(training.densities())) == 2
    training.exchange.set_buckets(training.exchange.buckets)
    training.step()
    assert len(set(training.densities())) == 2


def test_ranks_may_differ():
    """Each decides for itself; all get the same sum."""

    def work(transport):
        exchange = Exchange(transport, "residual", 1 / transport.size, schedule={"density": "kimad:0.5"})
        exchange.set_buckets(
            [
                exchange.bucket(
                    "b", [Tensor("t", 5000, 2)], grace_ext.compressor(SPEC), parse_stage("communicator", "sharded")
                )
            ]
        )
        (bucket,) = exchange.buckets
        outs = []
        for step in range(4):
            if step:
                exchange.schedules.densities["b"] = 0.01 * (1 + transport.rank)
            exchange.start(bucket, lambda out, step=step: np.copyto(out, gradient(10 * transport.rank + step)))
            exchange.advance()
            outs.append(np.empty(5000, np.float32))
            exchange.finish(bucket, outs[-1])
            exchange.end_step()
        return outs, bucket.compressor.sparsifier.density

    results = on_all_ranks(work)
    assert [density for _, density in results] == [0.01, 0.02, 0.03]
    for outs, _ in results[1:]:
        np.testing.assert_array_equal(outs, results[0][0])


@pytest.mark.parametrize(
    "schedule, spec, communicator, message",
    [
        ({"density": "kimad:0"}, SPEC, "allgather", "seconds"),
        ({"density": "kimad:1:prior=-1"}, SPEC, "allgather", "prior"),
        ({"density": "kimad:1:window=0"}, SPEC, "allgather", "window"),
        ({"bits": "kimad:1"}, SPEC, "allgather", "density"),
        ({"density": "kimad:1"}, "randomk:0.1:unbiased=false", "allgather", "positions"),
    ],
)
def test_what_does_not_fit_together(clock, schedule, spec, communicator, message):
    with pytest.raises(ConfigError, match=message):
        exchange = Exchange(Link(clock, 1e6), "residual", 1.0, schedule=schedule)
        exchange.set_buckets(
            [
                exchange.bucket(
                    "b", [Tensor("t", 100, 2)], grace_ext.compressor(spec), parse_stage("communicator", communicator)
                )
            ]
        )


def test_uniform_is_the_density_of_the_budget():
    sizes = 1000.0 * np.array(DENSITIES)
    assert uniform_density(sizes, 10.0) == pytest.approx(0.01, rel=0.01)
    assert uniform_density(sizes, 0.0) == DENSITIES[0]
    assert uniform_density(sizes, 1e9) == 1.0


def test_a_meter_counts_what_leaves_the_rank():
    def work(transport):
        seen = []
        meter = MeteredTransport(transport, lambda *collective: seen.append(collective))
        assert meter.hosts == transport.hosts and meter.size == transport.size
        meter.allgather("a", np.zeros(100, np.uint8)).wait()
        meter.allreduce("b", np.zeros(100, np.float32)).wait()
        splits = [10 * rank for rank in range(transport.size)]
        meter.alltoall("c", np.zeros(sum(splits), np.uint8), splits).wait()
        assert all(started <= ended for _, started, ended, _ in seen)
        return [sent for sent, *_ in seen]

    for rank, sent in enumerate(on_all_ranks(work)):
        assert sent == [200, pytest.approx(400 * 4 / 3), 30 - 10 * rank]
