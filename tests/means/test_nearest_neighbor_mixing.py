"""Mixing replaces updates by the means of their neighbours."""

import numpy as np
import pytest
from support.federated_means import SORTING, D, flipped, train, updates_of, vectors_of

from grace_ext.means import NearestNeighborMixing, TrimmedMean, base


@pytest.mark.parametrize("clients, share, kept", [(10, 0.3, 7), (10, 0.0, 10), (7, 0.25, 5), (2, 0.3, 2), (1, 0.4, 1)])
@pytest.mark.parametrize("one", SORTING)
@pytest.mark.parametrize("block", [7, 1000])
def test_mixing_replaces_updates_by_the_means_of_their_neighbors(one, clients, share, kept, block, monkeypatch):
    monkeypatch.setattr(base, "BLOCK", block)
    vectors = vectors_of(clients)
    mixed = []
    for vector in vectors:
        nearest = sorted(vectors, key=lambda other: np.linalg.norm(other - vector))[:kept]  # noqa: B023
        mixed.append(np.mean(nearest, axis=0, dtype=np.float32))
    found = NearestNeighborMixing(one, share)(updates_of(vectors), D)
    np.testing.assert_allclose(found, one(updates_of(mixed), D), atol=1e-6)


def test_mixing_takes_lengths_that_no_float32_has_the_square_of():
    vectors = vectors_of(4) * np.float32(2.0**100 / 20)
    found = NearestNeighborMixing(TrimmedMean(0.25), 0.25)(updates_of(vectors), D)
    assert np.isfinite(found).all() and found.any()


@pytest.mark.parametrize("one", SORTING)
def test_mixing_loses_less_where_clients_are_unlike(one):
    alone, mixed = (train(each, "none", "dense/raw", flipped, spread=1.0) for each in (one, NearestNeighborMixing(one, 0.3)))
    assert mixed < alone / 2
