"""Schedules: warm-up of the density, levels that change with the step, saving and loading."""

import numpy as np
import pytest
from support.in_process_ranks import on_all_ranks
from support.memory_exchanges import gradient, make, step

import grace_ext
from grace_ext import ConfigError
from grace_ext.pipeline.spec import parse_stage
from grace_ext.policy import Schedules
from grace_ext.policy.schedules import with_density
from grace_ext.transport import InProcessGroup


@pytest.mark.parametrize(
    "step, expected",
    [(0, 0.25), (99, 0.25), (100, 0.0625), (200, 0.015625), (399, 0.00390625), (400, 0.001), (10**6, 0.001)],
)
def test_warmup(step, expected):
    warmup = parse_stage("schedule", "warmup:400")
    assert warmup.at(step, 0.001) == pytest.approx(expected, rel=0.02)


@pytest.mark.parametrize(
    "step, expected", [(0, 0.25), (11, 0.25), (12, 0.23), (99, 0.03), (298, 0.01), (299, 0.01), (300, 0.01), (10**6, 0.01)]
)
def test_a_hyperbolic_schedule(step, expected):
    assert parse_stage("schedule", "hyperbolic:300").at(step, 0.01) == expected


def test_a_hyperbolic_schedule_never_falls_below_the_spec():
    assert [parse_stage("schedule", "hyperbolic:10").at(step, 0.4) for step in (0, 5, 20)] == [0.4] * 3


def test_a_density_and_levels_change_with_the_step():
    def work(transport):
        exchange = make(
            transport,
            "residual",
            "topk:0.01/raw/qsgd:7",
            schedule={"density": "warmup:4:start=0.16:stages=2", "bits": lambda step: 3 + step},
        )
        seen = []
        for i in range(6):
            step(exchange, gradient(transport.rank, i))
            seen.append(str(exchange.buckets[0].compressor))
        return seen

    specs = on_all_ranks(work, 2)
    assert specs[0] == specs[1]
    assert specs[0] == [
        "topk:0.16/raw/qsgd:3",
        "topk:0.16/raw/qsgd:4",
        "topk:0.04/raw/qsgd:5",
        "topk:0.04/raw/qsgd:6",
        "topk/raw/qsgd:7",
        "topk/raw/qsgd",
    ]


def test_a_schedule_goes_on_after_loading():
    transport = InProcessGroup(1).transport(0)
    options = {"memory": "residual", "schedule": {"density": lambda step: 0.5 if step < 2 else 0.01}}
    exchange = make(transport, **options)
    step(exchange, gradient(0, 0))
    step(exchange, gradient(0, 1))
    other = make(transport, **options)
    other.load_state_dict(exchange.state_dict())
    assert np.count_nonzero(step(other, gradient(0, 2))[0]) == 50


def test_schedules_that_cannot_be():
    transport = InProcessGroup(1).transport(0)
    with pytest.raises(ConfigError, match="no part of the specs has a number 'densty'; there are: bits, bucket, density"):
        make(transport, "none", "topk/raw/qsgd", schedule={"densty": "warmup"}).config_digest()
    with pytest.raises(ConfigError, match="unknown schedule 'linear'"):
        make(transport, "none", schedule={"density": "linear"})
    with pytest.raises(ConfigError, match="steps=0"):
        parse_stage("schedule", "warmup:0")
    for spec, message in (("hyperbolic:0", "steps=0"), ("hyperbolic:start=0", "start=0")):
        with pytest.raises(ConfigError, match=message):
            parse_stage("schedule", spec)
    exchange = make(transport, "none", schedule={"density": lambda step: 2.0})
    with pytest.raises(ConfigError, match=r"density=2\.0"):
        step(exchange, gradient(0, 0))
    exact = grace_ext.compressor("dense/raw")
    assert Schedules({"density": "warmup"}).at(exact, 0) is exact, "what has no density stays as it is"


def test_another_density_changes_nothing_else():
    compressor = grace_ext.compressor("dct:64/topk:0.1:per=chunk/rice/qsgd:7", seed=3)
    assert with_density(compressor, 0.25) == grace_ext.compressor("dct:64/topk:0.25:per=chunk/rice/qsgd:7", seed=3)
    with pytest.raises(ConfigError, match="density=2"):
        with_density(compressor, 2.0)
    for spec in ("dense/raw", "powersgd:4"):
        assert not grace_ext.compressor(spec).has_density
        with pytest.raises(ConfigError, match="no density"):
            with_density(grace_ext.compressor(spec), 0.1)


@pytest.mark.parametrize("schedule", [{"density": "warmup:7"}, {"density": lambda step: 0.02}])
def test_a_schedule_is_part_of_the_configuration(schedule):
    transport = InProcessGroup(1).transport(0)
    digests = {make(transport, "none", schedule=one).config_digest().tobytes() for one in (schedule, dict(schedule), None)}
    assert len(digests) == 2
