"""ef21, against the formulas of its paper, in real exchanges."""

import numpy as np
import pytest
from support.arrays import same_bits
from support.exchanges import arrays_of
from support.in_process_ranks import on_all_ranks
from support.memory_exchanges import RANKS, SIZE, gradient, make, step, topk


def test_ef21_is_the_papers():
    def work(transport):
        exchange = make(transport, "ef21", weight=3.0 / transport.size)
        return [step(exchange, gradient(transport.rank, i))[0] for i in range(6)], arrays_of(exchange)

    estimates = np.zeros((RANKS, SIZE))
    expected = []
    for i in range(6):
        estimates = estimates + [topk(gradient(rank, i) - estimates[rank], 500) for rank in range(RANKS)]
        expected.append(3 * estimates.mean(axis=0))
    for rank, (outs, state) in enumerate(on_all_ranks(work, RANKS)):
        np.testing.assert_allclose(outs, expected, rtol=0, atol=1e-4)
        kept = {field: np.concatenate([state[f"{field}:a"], state[f"{field}:b"]]) for field in ("estimate", "aggregate")}
        np.testing.assert_allclose(kept["estimate"], estimates[rank], rtol=0, atol=1e-5)
        np.testing.assert_allclose(kept["aggregate"], estimates.mean(axis=0), rtol=0, atol=1e-5)


@pytest.mark.parametrize("spec", ["topk:0.1/rice/raw", "topk:0.05/bloom/qsgd:7", "dct/topk:0.1/raw", "dense/minmax:8"])
def test_ef21_with_momentum_finds_a_constant_gradient(spec):
    """Whatever contracts, brings the aggregate to the mean of the ranks' gradients if these stand still."""

    def work(transport):
        exchange = make(transport, "ef21:0.5", spec)
        for _ in range(60):
            out, _ = step(exchange, gradient(transport.rank, 0))
        return out

    expected = np.mean([gradient(rank, 0) for rank in range(RANKS)], axis=0)
    results = on_all_ranks(work, RANKS)
    error = np.linalg.norm(results[0] - expected) / np.linalg.norm(expected)
    assert error < 0.02, error
    assert all(same_bits(results[0], other) for other in results)


@pytest.mark.parametrize("share", [0.02, 0.5])
def test_the_estimate_contracts_as_lemma_3_of_kimad_says(share):
    """|u' - g'|² <= (1 - a)(1 + z) |u - g|² + (1 - a)(1 + 1/z) |g' - g|² for any z > 0, with Top-K's a = k / d."""

    def work(transport):
        exchange, estimates = make(transport, "ef21", f"topk:{share}/rice/raw"), [np.zeros(SIZE)]
        for i in range(5):
            step(exchange, gradients[i])
            state = arrays_of(exchange)
            estimates.append(np.concatenate([state["estimate:a"], state["estimate:b"]]).astype(np.float64))
        return estimates

    def square(x):
        return float(np.dot(x, x))

    gradients = [gradient(0, 0) + np.float32(0.3) * gradient(0, i) for i in range(5)]
    (estimates,) = on_all_ranks(work, 1)
    for i in range(1, 5):
        before, after = square(estimates[i] - gradients[i - 1]), square(estimates[i + 1] - gradients[i])
        for z in (0.01, 0.1, 0.5, 1.0, 4.0, 50.0):
            bound = (1 + z) * before + (1 + 1 / z) * square(gradients[i] - gradients[i - 1])
            assert after <= (1 - share) * bound * (1 + 1e-5)
        assert after > 0
