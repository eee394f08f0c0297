"""The mean of clipped updates."""

import numpy as np
from support.federated_means import D, train, updates_of, vectors_of

from grace_ext.means import ClippedMean, WeightedMean


def test_the_clipped_mean_scales_long_updates_down():
    vectors = vectors_of(4) * np.array([[1], [1], [0.1], [1e6]], np.float32)
    shares, norms = [0.1, 0.2, 0.3, 0.4], np.linalg.norm(vectors.astype(float), axis=1)
    for radius, given in ((np.median(norms), None), (5.0, 5.0)):
        expected = sum(
            share * min(1, radius / norm) * vector for share, norm, vector in zip(shares, norms, vectors, strict=True)
        )
        np.testing.assert_allclose(ClippedMean(given)(updates_of(vectors, shares), D), expected, rtol=1e-4, atol=1e-5)
    zeros = updates_of(np.zeros((3, D), np.float32))
    assert not ClippedMean()(zeros, D).any()


def test_with_the_clipped_mean_long_updates_count_no_more_than_others():
    def sideways(change):
        return np.full(D, 5 * np.linalg.norm(change) / np.sqrt(D), np.float32) * np.float32(-1)

    clipped, plain = (train(one, "none", "dense/raw", sideways, rounds=40) for one in (ClippedMean(), WeightedMean()))
    assert clipped < 0.8 < 1.2 < plain
