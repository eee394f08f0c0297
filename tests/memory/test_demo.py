"""demo, against its formulas, in real exchanges."""

import numpy as np
import pytest
from support.exchanges import arrays_of
from support.in_process_ranks import on_all_ranks
from support.memory_exchanges import RANKS, gradient, make, step, topk

import grace_ext
from grace_ext import ConfigError
from grace_ext.transport import InProcessGroup


def test_it_is_the_papers():
    """Momenta decay, what is sent is taken out of them, and the step is the sign of the sum."""

    def work(transport):
        exchange = make(transport, "demo:0.9")
        return [step(exchange, gradient(transport.rank, i))[0] for i in range(4)], arrays_of(exchange)

    momenta = np.zeros((RANKS, 5000), np.float32)
    results = on_all_ranks(work, RANKS)
    for i in range(4):
        sent = []
        for rank in range(RANKS):
            momenta[rank] += gradient(rank, i)
            sent.append(topk(momenta[rank], 500))
            momenta[rank] -= sent[-1]
        momenta *= np.float32(0.9)
        expected = np.sign(np.sum(sent, axis=0))
        assert all(np.array_equal(outs[i], expected) for outs, _ in results)
        assert 500 <= np.count_nonzero(expected) <= 500 * RANKS
    for rank, (_, arrays) in enumerate(results):
        found = np.concatenate([arrays["residual:a"], arrays["residual:b"]])
        np.testing.assert_allclose(found, momenta[rank], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("spec", ["dct:16/topk:0.05:per=chunk/auto/lloyd:0.05", "dense/raw", "powersgd:2", "topk:0.1"])
@pytest.mark.parametrize("weight", [1 / RANKS, 1.0])
def test_the_step_is_a_sign_times_the_factor_of_the_mean(spec, weight):
    def work(transport):
        return step(make(transport, "demo", spec, weight=weight), gradient(transport.rank, 0))[0]

    results = on_all_ranks(work, RANKS)
    factor = np.float32(weight * RANKS)
    assert set(np.unique(results[0])) <= {-factor, 0.0, factor} and results[0].any()
    assert all(np.array_equal(results[0], other) for other in results)
    if spec == "dense/raw":
        mean = np.sum([gradient(rank, 0) for rank in range(RANKS)], axis=0)
        assert np.array_equal(results[0], factor * np.sign(mean))


def test_an_optimizer_with_a_momentum_is_refused():
    memory = grace_ext.memory("demo")
    memory.check_optimizer("SGD", 0.0, None)
    for name, momentum, kind in (("SGD", 0.9, None), ("AdamW", 0.9, "adam")):
        with pytest.raises(ConfigError, match=f"momentum before gradients are compressed, and that of {name}"):
            memory.check_optimizer(name, momentum, kind)
    with pytest.raises(ConfigError, match="decay=0"):
        grace_ext.memory("demo:0")
    assert make(InProcessGroup(1).transport(0), "demo", "dense/raw").buckets[0].memory is not None
