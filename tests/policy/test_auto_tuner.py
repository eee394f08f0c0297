"""AutoTuner: trials, and choices that all ranks make alike."""

import threading
import time
import types

import numpy as np
import pytest
from support.auto_exchanges import COMPRESSED, FLOAT32, FP16, make, step
from support.in_process_ranks import gradient, on_all_ranks
from support.listeners import listener_of

from grace_ext import ConfigError
from grace_ext.pipeline.spec import parse_stage
from grace_ext.policy import auto_tuner
from grace_ext.policy.auto_tuner import AutoTuner
from grace_ext.policy.cost_model import Link
from grace_ext.transport.inprocess import InProcessTransport


@pytest.fixture(autouse=True)
def links_can_be_measured(monkeypatch):
    monkeypatch.setattr(InProcessTransport, "probe_transport", lambda self: self)


def test_the_model_takes_what_pays():
    """Two buckets of a million elements: one whose codec is quick, one for which it takes longer than its bytes here."""
    link, hosts = Link(1e-4, 0.0, 8 / 1e9), (0, 1, 2, 3)
    links = dict.fromkeys(("allgather", "allreduce", "alltoall"), link)
    predicted = [
        {
            way: auto_tuner.seconds_of(way, 10**6, auto_tuner.codec_of(10**6, *given), links, hosts)
            for way, given in (("allgather", (1e4, codec)), ("float32", (4e6, 0.0)))
        }
        for codec in (1e-3, 1.0)
    ]
    assert predicted[0]["float32"] == pytest.approx(1e-4 + 6e6 * 8e-9)
    assert predicted[0]["allgather"] == pytest.approx(1e-3 + 1e-4 + 3e4 * 8e-9)
    assert auto_tuner.plans(predicted, 0.0) == [("allgather", "float32")]
    assert auto_tuner.plans(predicted, 0.06) == [("allgather", "float32"), ("float32", "float32")]
    assert auto_tuner.plans(predicted, 2.0) == [("allgather", "float32"), ("allgather", "allgather"), ("float32", "float32")]
    assert auto_tuner.plans(predicted[:1], 2.0) == [("allgather",), ("float32",)]


def test_the_model_knows_how_containers_travel():
    link = Link(0.0, 0.0, 1.0)
    links = dict.fromkeys(("allgather", "allreduce", "alltoall"), link)
    seconds = {
        way: auto_tuner.seconds_of(way, 1000, auto_tuner.codec_of(1000, 120, 0.0), links, (0, 0, 1, 1, 2, 2))
        for way in ("allgather", "sharded", "hierarchical", "factors")
    }
    assert seconds == pytest.approx({"allgather": 600, "sharded": 200, "hierarchical": 120, "factors": 200}, rel=0.01)


def test_all_ranks_choose_the_same_whatever_they_measured():
    def work(transport):
        exchange, seen, out = make(transport), [], []
        for i in range(60):
            time.sleep(0.002 * ((i + transport.rank) % 3))
            out.append(step(exchange, gradient(100 * transport.rank + i))[0])
            seen.append([bucket.communicator.strategy for bucket in exchange.buckets])
        return seen, np.stack(out)

    results = on_all_ranks(work)
    assert len({tuple(seen) for seen in results[0][0]}) >= 2, "nothing was tried"
    for seen, out in results[1:]:
        assert seen == results[0][0]
        np.testing.assert_array_equal(out, results[0][1])


def test_ranks_choose_by_the_mean_of_their_clocks(monkeypatch):
    """Each would choose another way by its own."""
    clock = threading.local()
    monkeypatch.setattr(auto_tuner, "time", types.SimpleNamespace(perf_counter=lambda: getattr(clock, "now", 0.0)))
    monkeypatch.setattr(auto_tuner, "plans", lambda *_, **__: [(COMPRESSED, COMPRESSED), (FLOAT32, FLOAT32)])
    monkeypatch.setattr(auto_tuner, "_ROUNDS", 1)

    def work(transport):
        exchange, clock.now = make(transport), 0.0
        while listener_of(exchange, AutoTuner)._next != listener_of(exchange, AutoTuner)._recheck:
            is_fast = exchange.buckets[0].communicator.strategy == (COMPRESSED if transport.rank == 0 else FLOAT32)
            clock.now += 1.0 if is_fast else 1.5
            step(exchange, np.zeros(5000, np.float32))
        return listener_of(exchange, AutoTuner).plan

    assert set(on_all_ranks(work)) == {(FLOAT32, FLOAT32)}


def test_a_machine_that_gets_faster_does_not_favour_the_later_trial(monkeypatch):
    """Containers are 4 % faster than float32, and each step is half a percent faster than the one before."""
    clock = threading.local()
    monkeypatch.setattr(auto_tuner, "time", types.SimpleNamespace(perf_counter=lambda: getattr(clock, "now", 0.0)))
    monkeypatch.setattr(auto_tuner, "plans", lambda *_, **__: [(COMPRESSED, COMPRESSED), (FLOAT32, FLOAT32)])

    def work(transport):
        exchange = make(transport)
        clock.now = 0.0
        for i in range(60):
            way = exchange.buckets[0].communicator.strategy
            clock.now += 0.995**i * (1.0 if way == COMPRESSED else 1.04)
            step(exchange, gradient(i))
        return listener_of(exchange, AutoTuner).plan

    assert set(on_all_ranks(work)) == {(COMPRESSED, COMPRESSED)}


def test_plans_that_are_close_are_tried_again(monkeypatch):
    """The first trials of containers are disturbed, and float32 looks faster; float16 is out of the question."""
    clock = threading.local()
    monkeypatch.setattr(auto_tuner, "time", types.SimpleNamespace(perf_counter=lambda: getattr(clock, "now", 0.0)))
    monkeypatch.setattr(auto_tuner, "plans", lambda *_, **__: [(way, way) for way in (COMPRESSED, FLOAT32, FP16)])

    def work(transport):
        exchange, tried = make(transport), []
        clock.now = 0.0
        for i in range(230):
            way = exchange.buckets[0].communicator.strategy
            if not tried or tried[-1] != way:
                tried.append(way)
            clock.now += {COMPRESSED: 1.15 if i < 50 else 1.0, FLOAT32: 1.1, FP16: 2.0}[way]
            step(exchange, gradient(i))
        return listener_of(exchange, AutoTuner).plan, tried

    for plan, tried in on_all_ranks(work):
        assert plan == (COMPRESSED, COMPRESSED)
        assert tried == [COMPRESSED, FLOAT32, FP16, *[FLOAT32, COMPRESSED] * auto_tuner._ROUNDS]


def test_the_more_trials_the_closer_a_plan_has_to_come(monkeypatch):
    """float32 takes 11 % longer, which one round could not tell from noise."""
    clock = threading.local()
    monkeypatch.setattr(auto_tuner, "time", types.SimpleNamespace(perf_counter=lambda: getattr(clock, "now", 0.0)))
    monkeypatch.setattr(auto_tuner, "plans", lambda *_, **__: [(COMPRESSED, COMPRESSED), (FLOAT32, FLOAT32)])

    def work(transport):
        exchange, tried = make(transport), []
        clock.now = 0.0
        for i in range(230):
            way = exchange.buckets[0].communicator.strategy
            tried.append(way)
            clock.now += {COMPRESSED: 1.0, FLOAT32: 1.11}[way]
            step(exchange, gradient(i))
        return listener_of(exchange, AutoTuner).plan, tried.count(FLOAT32)

    trial = auto_tuner._SETTLES + auto_tuner._TRIAL
    assert set(on_all_ranks(work)) == {((COMPRESSED, COMPRESSED), 2 * 4 * trial)}, "four rounds of two trials"


def test_a_choice_is_looked_at_again(monkeypatch):
    monkeypatch.setattr(auto_tuner, "_CHECK", 5)
    monkeypatch.setattr(auto_tuner, "_AGAIN", 10)
    monkeypatch.setattr(auto_tuner, "_ROUNDS", 1)

    def work(transport):
        exchange, starts = make(transport), []
        for i in range(120):
            step(exchange, gradient(i))
            if listener_of(exchange, AutoTuner)._left == auto_tuner._FIRST:
                starts.append(i)
        return starts

    starts, *others = on_all_ranks(work)
    assert 1 <= len(starts) and all(other == starts for other in others)


@pytest.mark.parametrize(
    "later, again", [((1.6, 1.6, 1.6), False), ((1.0, 1.4, 1.0), False), ((1.6, 5.0, 1.0), True), ((5.0, 5.0, 5.0), True)]
)
def test_a_choice_is_made_again_when_steps_become_slower_than_they_were_with_it(monkeypatch, later, again):
    """later: seconds of a step in the 50 steps after the choice, whose trials took 1 s a step, the 50 after that, ..."""
    clock = threading.local()
    monkeypatch.setattr(auto_tuner, "time", types.SimpleNamespace(perf_counter=lambda: getattr(clock, "now", 0.0)))
    monkeypatch.setattr(auto_tuner, "plans", lambda *_, **__: [(COMPRESSED, COMPRESSED)])

    def work(transport):
        exchange, looked = make(transport), 0
        clock.now = 0.0
        while looked < 3 * auto_tuner._CHECK:
            tuner = listener_of(exchange, AutoTuner)
            if tuner._next == tuner._recheck:
                clock.now += later[looked // auto_tuner._CHECK]
                looked += 1
            elif looked:
                return True
            else:
                clock.now += 1.0
            step(exchange, np.zeros(5000, np.float32))
        return False

    assert set(on_all_ranks(work)) == {again}


def test_it_says_where_it_works():
    with pytest.raises(ConfigError, match="inside an Exchange only"):
        parse_stage("communicator", "auto").start(None, "a", None, np.zeros(3, np.float32), None, None)
