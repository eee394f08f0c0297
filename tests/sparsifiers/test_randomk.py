"""randomk: all positions alike, the same on all ranks, and no bias where none is wanted."""

import math

import numpy as np
import pytest
from support.arrays import gauss, same_bits
from support.reference_kernels import sparse as reference_sparse
from support.selection import select

import grace_ext
from grace_ext import ConfigError
from grace_ext._util.rng import Stream
from grace_ext.exchange.buckets import Bucket, Tensor
from grace_ext.pipeline.spec import parse_stage


def test_randomk_draws_the_same_on_all_ranks():
    dense, k = gauss(5000), 50
    key = {"seed": 3, "name": "w", "step": 8}
    expected = reference_sparse.draw_positions(k, 5000, *Stream(**key).shared().key())
    for rank in range(4):
        assert select("randomk:0.01", dense, Stream(**key, rank=rank)).tolist() == expected
    for other in ({"seed": 4}, {"name": "v"}, {"step": 9}):
        assert select("randomk:0.01", dense, Stream(**{**key, **other})).tolist() != expected


@pytest.fixture(scope="module")
def draws():
    """(gradient of 300, density, decoded gradients of 4,000 steps, as float64)."""
    dense, c = gauss(300, 5), grace_ext.compressor("randomk:0.15:unbiased=true", seed=1)
    decoded = [grace_ext.decompress(c.compress(dense, name="w", step=step), 300) for step in range(4000)]
    return dense.astype(np.float64), 45 / 300, np.array(decoded, np.float64)


def test_every_position_is_sent_equally_often(draws):
    """Bernstein: a count is this far off with probability 1e-9 / d. And all together, chi-square within 6 sigma (2e-9)."""
    _, p, decoded = draws
    steps, d = decoded.shape
    assert ((decoded != 0).sum(1) == p * d).all()
    off = (decoded != 0).sum(0) - p * steps
    variance, log = steps * p * (1 - p), math.log(2 * d / 1e-9)
    assert abs(off).max() <= log / 3 + math.sqrt(log**2 / 9 + 2 * variance * log)
    assert abs((off**2).sum() / variance / d - 1) <= 6 * math.sqrt(2 / d)


def test_randomk_is_unbiased(draws):
    """The values are exactly d / k times the gradient's, so with the counts above the mean is right; and for a projection,
    Bernstein's bound on the mean of independent steps: off by more with probability 1e-9 for each of 20."""
    dense, p, decoded = draws
    np.testing.assert_allclose(decoded[decoded != 0], np.broadcast_to(dense / p, decoded.shape)[decoded != 0], rtol=1e-6)
    for seed in range(20):
        along = gauss(300, seed).astype(np.float64)
        errors = decoded @ along - dense @ along
        largest = np.abs(dense * along).sum() / p
        bound = math.sqrt(2 * errors.var() * math.log(2e9) / len(errors)) + largest * math.log(2e9) / (3 * len(errors))
        assert abs(errors.mean()) <= bound


def test_randomk_has_the_variance_of_random_choice(draws):
    """E |C(x) - x|^2 = (d / k - 1) |x|^2: Stich et al. for independent choice; the sum here is off by 5 % only beyond
    6 sigma."""
    dense, p, decoded = draws
    found = ((decoded - dense) ** 2).sum(1)
    assert 6 * found.std() / math.sqrt(len(found)) < 0.05 * found.mean()
    assert abs(found.mean() / ((1 / p - 1) * (dense @ dense)) - 1) < 0.05


def test_unbiased_values_stay_finite_and_the_residual_is_what_is_missing():
    dense = gauss(1000)
    dense[:500] = np.finfo(np.float32).max
    c = grace_ext.compressor("randomk:0.1:unbiased=true/shared/fp16")
    assert not c.lossless and np.isfinite(grace_ext.decompress(c.compress(dense), 1000)).all()
    pending = np.empty_like(dense)
    encoded = c.encode_compensated(dense[500:].copy(), np.zeros(500, np.float32), pending[:500], Stream())
    assert same_bits(pending[:500], dense[500:] - grace_ext.decompress(encoded.blob, 500))


def test_error_feedback_on_top_of_unbiased_values_is_refused():
    def bucket(memory, text):
        allgather = parse_stage("communicator", "allgather")
        return Bucket("b", [Tensor("a", 10, 2)], grace_ext.compressor(text), allgather, memory)

    with pytest.raises(ConfigError, match="memory 'none'"):
        bucket(grace_ext.memory("residual"), "randomk:0.1:unbiased=true")
    bucket(grace_ext.memory("none"), "randomk:0.1:unbiased=true")
    bucket(grace_ext.memory("residual"), "randomk:0.1")
