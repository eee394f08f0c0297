"""dgc, against the formulas of its paper, in real exchanges."""

import numpy as np
import pytest
from support.exchanges import arrays_of
from support.in_process_ranks import on_all_ranks
from support.memory_exchanges import RANKS, SIZE, gradient, make, step, topk

from grace_ext.transport import InProcessGroup


def dgc_reference(steps, momentum, masking=True, nesterov=False, clip=0.0, k=500, deviations=0.0):
    """Algorithm 4 of the paper for all ranks, in float64."""
    u = v = np.zeros((RANKS, SIZE))
    for i in range(steps):
        g = np.stack([gradient(rank, i) for rank in range(RANKS)]).astype(float)
        if clip:
            for part in (slice(0, 3000), slice(3000, SIZE)):
                norms = np.linalg.norm(g[:, part], axis=1, keepdims=True)
                g[:, part] *= np.minimum(1, clip / np.sqrt(RANKS) / norms)
        u = momentum * (u + g) if nesterov else momentum * u + g
        v = v + u + (g if nesterov else 0)
        if deviations:
            for part in (slice(0, 3000), slice(3000, SIZE)):
                limits = deviations * v[:, part].std(axis=1, keepdims=True)
                v[:, part] = np.clip(v[:, part], -limits, limits)
        sent = np.stack([topk(row, k) for row in v])
        v = v - sent
        u = np.where(sent != 0, 0, u) if masking else u
        yield sent.mean(axis=0), u, v


@pytest.mark.parametrize(
    "options, keywords",
    [
        ("", {}),
        (":masking=false", {"masking": False}),
        (":nesterov=true", {"nesterov": True}),
        (":clip=20", {"clip": 20.0}),
        (":0.5:clip=1e9", {"momentum": 0.5}),
        (":deviations=2.5", {"deviations": 2.5}),
        (":deviations=3:nesterov=true", {"deviations": 3.0, "nesterov": True}),
    ],
)
def test_dgc_is_the_papers(options, keywords):
    def work(transport):
        exchange = make(transport, "dgc" + options)
        return [step(exchange, gradient(transport.rank, i))[0] for i in range(6)], arrays_of(exchange)

    results = on_all_ranks(work, RANKS)
    *_, (_, u, v) = expected = list(dgc_reference(6, **{"momentum": 0.9, **keywords}))
    for rank, (outs, state) in enumerate(results):
        for out, (mean, _, _) in zip(outs, expected, strict=True):
            np.testing.assert_allclose(out, mean, rtol=0, atol=1e-4)
        kept = {field: np.concatenate([state[f"{field}:a"], state[f"{field}:b"]]) for field in ("velocity", "residual")}
        np.testing.assert_allclose(kept["velocity"], u[rank], rtol=0, atol=1e-4)
        np.testing.assert_allclose(kept["residual"], v[rank], rtol=0, atol=1e-4)


def test_dgc_on_exact_tensors_is_the_optimizers_momentum():
    def work(transport):
        exchange = make(transport, "dgc:0.8", "dense/raw")
        assert exchange.buckets[0].compressor.exact
        return [step(exchange, gradient(transport.rank, i))[0] for i in range(5)], arrays_of(exchange)

    expected = np.zeros(SIZE)
    velocities = []
    for i in range(5):
        expected = 0.8 * expected + np.mean([gradient(rank, i) for rank in range(RANKS)], axis=0)
        velocities.append(expected)
    for outs, state in on_all_ranks(work, RANKS):
        np.testing.assert_allclose(outs, velocities, rtol=0, atol=1e-5)
        assert set(state) == {"velocity:a", "velocity:b"}


def test_dgc_keeps_the_velocity_of_what_a_dense_quantizer_sends():
    exchange = make(InProcessGroup(1).transport(0), "dgc", "dense/fp16")
    step(exchange, gradient(0, 0))
    assert np.count_nonzero(arrays_of(exchange)["velocity:a"]) > 2900
