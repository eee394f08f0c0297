"""momentum, against its formulas, in real exchanges."""

import numpy as np
import pytest
from support.exchanges import arrays_of
from support.in_process_ranks import on_all_ranks
from support.memory_exchanges import RANKS, SIZE, gradient, make, step, topk

import grace_ext
from grace_ext import ConfigError
from grace_ext.memory.momentum import Momentum
from grace_ext.transport import InProcessGroup


def momentum_reference(steps, momentum, decay=1.0, k=500):
    """Compressed momentum on all ranks, in float64."""
    m = e = np.zeros((RANKS, SIZE))
    for i in range(steps):
        g = np.stack([gradient(rank, i) for rank in range(RANKS)]).astype(float)
        m = momentum * m + (1 - momentum) * g
        sent = np.stack([topk(row, k) for row in e + m])
        e = decay * (e + m - sent)
        yield sent.mean(axis=0), m, e


@pytest.mark.parametrize(
    "options, keywords", [("", {}), (":0.5", {"momentum": 0.5}), (":0", {"momentum": 0.0}), (":decay=0.9", {"decay": 0.9})]
)
def test_momentum_is_that_of_its_formulas(options, keywords):
    def work(transport):
        exchange = make(transport, "momentum" + options)
        return [step(exchange, gradient(transport.rank, i))[0] for i in range(6)], arrays_of(exchange)

    *_, (_, m, e) = expected = list(momentum_reference(6, **{"momentum": 0.9, **keywords}))
    for rank, (outs, state) in enumerate(on_all_ranks(work, RANKS)):
        np.testing.assert_allclose(outs, [mean for mean, _, _ in expected], rtol=0, atol=1e-5)
        kept = {field: np.concatenate([state[f"{field}:a"], state[f"{field}:b"]]) for field in ("velocity", "residual")}
        np.testing.assert_allclose(kept["velocity"], m[rank], rtol=0, atol=1e-5)
        np.testing.assert_allclose(kept["residual"], e[rank], rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    "spec, communicator",
    [
        ("powersgd:4", "allgather"),
        ("dct/topk:0.1/raw", "allgather"),
        ("topk:0.1/rice/qsgd:7", "sharded"),
        ("topk:0.1/rice/qsgd:7", "hierarchical"),
    ],
)
def test_what_was_sent_and_what_is_kept_are_all_momenta(spec, communicator):
    """Whatever the compression: the sums of what arrives and of the residuals are those of the first moments."""

    def work(transport):
        exchange = make(transport, "momentum", spec, communicator=communicator)
        outs = [step(exchange, gradient(transport.rank, i))[0] for i in range(5)]
        state = arrays_of(exchange)
        return np.sum(outs, axis=0), np.concatenate([state["residual:a"], state["residual:b"]])

    m, total = np.zeros((RANKS, SIZE)), np.zeros(SIZE)
    for i in range(5):
        m = 0.9 * m + 0.1 * np.stack([gradient(rank, i) for rank in range(RANKS)])
        total += m.mean(axis=0)
    results = on_all_ranks(work, RANKS)
    kept = np.mean([residual for _, residual in results], axis=0)
    np.testing.assert_allclose(results[0][0] + kept, total, rtol=0, atol=1e-4)


def test_tensors_that_are_sent_exactly_are_left_to_the_optimizer():
    exchange = make(InProcessGroup(1).transport(0), "momentum:0.8", "dense/raw")
    np.testing.assert_array_equal(step(exchange, gradient(0, 0))[0], gradient(0, 0))
    assert not exchange.buckets[0].memory.applies_momentum and arrays_of(exchange) == {}


def test_it_works_only_in_exchanges():
    with pytest.raises(ConfigError, match="use it in an exchange"):
        grace_ext.memory("momentum").compensate("w", np.zeros(3, np.float32))


@pytest.mark.parametrize("beta", [0.9, 0.5, 0.0])
def test_step_gain_is_how_much_further_an_adam_moves(beta):
    """Adam on momenta against Adam with a first moment of its own, both without bias correction, on the same noise."""
    noise = np.random.default_rng(0).standard_normal((600, 2000))
    moment, squares = np.zeros(2000), np.ones((2, 2000))
    moved = np.zeros((2, 2000))
    for i, g in enumerate(noise):
        moment = beta * moment + (1 - beta) * g
        squares = 0.99 * squares + 0.01 * np.stack([g, moment]) ** 2
        if i >= 400:  # the second moments have settled
            moved += moment / np.sqrt(squares)
    dense, fed = np.sqrt((moved**2).mean(axis=1))
    assert fed / dense == pytest.approx(Momentum(beta).step_gain, rel=0.1)
