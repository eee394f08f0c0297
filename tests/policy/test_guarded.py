"""The density that follows the lag: what waits in residuals, against the root of the number of steps."""

import math

import numpy as np
import pytest
from support.exchanges import arrays_of
from support.in_process_ranks import on_all_ranks
from support.memory_exchanges import RANKS, gradient, make, step

from grace_ext import ConfigError
from grace_ext.exchange import checkpoint
from grace_ext.pipeline.spec import parse_stage
from grace_ext.policy.guarded import EVERY
from grace_ext.transport import InProcessGroup
from grace_ext.transport.inprocess import InProcessTransport

SCHEDULE = {"density": "guarded:0.4"}


@pytest.fixture(autouse=True)
def collectives_between_steps(monkeypatch):
    monkeypatch.setattr(InProcessTransport, "probe_transport", lambda self: self)
    monkeypatch.setenv("GRACE_EXT_WARN", "0")  # no other probes


def densities_of(exchange):
    return exchange.stats()["densities"]


def lag_of(exchange, given):
    """Energy of the residual and of the gradient."""
    arrays = arrays_of(exchange)
    residual = np.concatenate([arrays["residual:a"], arrays["residual:b"]])
    return np.square(residual.astype(float)).sum(), np.square(given.astype(float)).sum()


def train(exchange, rank, steps, start=0):
    """Outputs of steps, and the density after each."""
    found = []
    for i in range(start, start + steps):
        out, _ = step(exchange, gradient(rank, i))
        found.append((out, densities_of(exchange)["a"]))
    return found


def test_the_lag_follows_the_root_of_the_number_of_steps():
    def work(transport):
        exchange = make(transport, "residual", schedule=SCHEDULE)
        densities = [density for _, density in train(exchange, transport.rank, 400)]
        energies = lag_of(exchange, gradient(transport.rank, 400))
        train(exchange, transport.rank, 1, 400)  # a step that is measured
        return densities, energies, exchange.stats()["lag"]

    results = on_all_ranks(work, RANKS)
    densities, _, lag = results[0]
    assert all(other[0] == densities and other[2] == lag for other in results)
    residuals, gradients = np.sum([energies for _, energies, _ in results], axis=0)
    assert lag == pytest.approx(residuals / gradients, rel=1e-4)
    assert densities[0] == 0.25 and densities[-1] < 0.1
    assert 0.6 < lag / (0.4 * math.sqrt(400)) < 1.6
    # It changes after the steps that are measured, and in no other.
    changed = {i for i in range(1, 400) if densities[i] != densities[i - 1]}
    assert changed <= {1, 2, 4, 8, *range(EVERY, 400, EVERY)} and len(changed) > 10


def test_more_waits_with_a_larger_share_and_no_density_leaves_its_bounds():
    def work(transport, schedule):
        return [density for _, density in train(make(transport, "residual", schedule={"density": schedule}), 0, 200)]

    small, large, bounded = (
        work(InProcessGroup(1).transport(0), spec) for spec in ("guarded:0.2", "guarded:2", "guarded:2:start=0.2:least=0.15")
    )
    assert large[-1] < small[-1]
    assert set(bounded) <= {0.2, 0.15, *(density for density in bounded if 0.15 <= density <= 0.2)} and bounded[-1] == 0.15


def test_a_training_that_is_resumed_goes_on_with_the_same_densities():
    def work(transport):
        exchange = make(transport, "residual", schedule=SCHEDULE)
        train(exchange, transport.rank, 40)
        saved = checkpoint.pack(exchange.state_dict(), transport.rank, transport.size, ["a", "b"])
        expected = train(exchange, transport.rank, 40, 40)
        resumed = make(transport, "residual", schedule=SCHEDULE)
        loaded = checkpoint.choose(saved, resumed, None)
        assert not loaded.is_incomplete, loaded.message
        resumed.load_state_dict(loaded.state)
        found = train(resumed, transport.rank, 40, 40)
        return expected, found

    for expected, found in on_all_ranks(work, 1):
        assert [density for _, density in expected] == [density for _, density in found]
        assert all(np.array_equal(one, other) for (one, _), (other, _) in zip(expected, found, strict=True))


def test_new_ranks_take_over_the_density():
    def work(transport):
        exchange = make(transport, "residual", schedule=SCHEDULE)
        own = None
        if transport.rank < 2:
            old = make(InProcessGroup(1).transport(0), "residual", schedule=SCHEDULE)
            train(old, transport.rank, 40)
            own = old.state_dict()
            own["density"] = {name: np.array([0.123], np.float32) for name in "ab"}
        exchange.load_state_dict(checkpoint.gather_and_redistribute(exchange, own, "new"))
        return densities_of(exchange)

    assert on_all_ranks(work, RANKS) == [{"a": 0.123, "b": 0.123}] * RANKS


def test_a_step_that_is_not_finite_changes_nothing():
    exchange = make(InProcessGroup(1).transport(0), "residual", schedule=SCHEDULE)
    train(exchange, 0, 32)
    before, lag = densities_of(exchange), exchange.stats()["lag"]
    broken = gradient(0, 32)
    broken[7] = np.nan
    _, finite = step(exchange, broken)  # step 32 is measured
    assert not finite and (densities_of(exchange), exchange.stats()["lag"]) == (before, lag)


def test_tensors_without_a_residual_keep_their_density():
    exchange = make(InProcessGroup(1).transport(0), {"a": "none", "*": "residual"}, "topk:0.03", schedule=SCHEDULE)
    for i in range(40):
        step(exchange, gradient(0, i))
    assert [bucket.compressor.sparsifier.density for bucket in exchange.buckets] == [0.03, densities_of(exchange)["b"]]
    assert densities_of(exchange)["b"] > 0.03 and "a" not in densities_of(exchange)


def test_what_cannot_be_guarded_is_refused(monkeypatch):
    transport = InProcessGroup(1).transport(0)
    for memory, spec in (("none", "topk:0.1"), ("residual", "dense/qsgd:7"), ("ef21", "topk:0.1"), ("muon", "topk:0.1")):
        with pytest.raises(ConfigError, match="no tensor has both a density and a residual of gradients"):
            make(transport, memory, spec, schedule=SCHEDULE)
    with pytest.raises(ConfigError, match="'guarded' adapts the density, communicator 'auto' the strategy"):
        make(transport, "residual", schedule=SCHEDULE, communicator="auto")
    with pytest.raises(ConfigError, match="for the density, not for levels"):
        make(transport, "residual", schedule={"levels": "guarded"})
    for wrong in ("share=0", "share=nan", "start=1.5", "least=0", "start=0.01:least=0.1"):
        with pytest.raises(ConfigError, match="guarded: .*allowed"):
            parse_stage("schedule", f"guarded:{wrong}")
    monkeypatch.setattr(InProcessTransport, "probe_transport", lambda self: None)
    with pytest.raises(ConfigError, match="collectives between steps"):
        on_all_ranks(lambda t: make(t, "residual", schedule=SCHEDULE), 2)
