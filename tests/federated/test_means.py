"""What the server makes of updates of which some lie: the means, by themselves and in training."""

import weakref

import numpy as np
import pytest

from grace_ext import ConfigError
from grace_ext.federated import (
    Client,
    ClippedMean,
    Median,
    NearestNeighborMixing,
    Rejected,
    Server,
    TrimmedMean,
    WeightedMean,
    mean,
)
from grace_ext.federated.mean import Update

D, CLIENTS, LIARS = 300, 10, 3  # those with the lowest numbers lie
SORTING = [Median(), TrimmedMean(0.3)]
ROBUST = [*SORTING, *(NearestNeighborMixing(one, 0.3) for one in SORTING)]


def updates_of(vectors, shares=None):
    shares = [1 / len(vectors)] * len(vectors) if shares is None else shares
    return [
        Update(lambda vector=vector: vector, float(np.linalg.norm(vector)), share)
        for vector, share in zip(vectors, shares, strict=True)
    ]


def vectors_of(count, seed=0):
    return np.random.default_rng(seed).standard_normal((count, D)).astype(np.float32)


@pytest.mark.parametrize("clients", [1, 2, 3, 6, 7])
@pytest.mark.parametrize("block", [7, 100, 1000])
def test_the_median_is_that_of_each_element(clients, block, monkeypatch):
    monkeypatch.setattr(mean, "BLOCK", block)
    vectors = vectors_of(clients)
    np.testing.assert_allclose(Median()(updates_of(vectors), D), np.median(vectors, axis=0), rtol=1e-6)


@pytest.mark.parametrize(
    "clients, share, left",
    [(10, 0.3, 4), (10, 0.0, 10), (10, 0.25, 4), (7, 0.3, 1), (2, 0.3, 2), (1, 0.4, 1), (3, 0.4, 1), (20, 0.1, 16)],
)
def test_the_trimmed_mean_leaves_out_at_least_its_share_at_each_end(clients, share, left):
    vectors, cut = vectors_of(clients), (clients - left) // 2
    expected = np.sort(vectors, axis=0)[cut : clients - cut].mean(axis=0)
    np.testing.assert_allclose(TrimmedMean(share)(updates_of(vectors), D), expected, atol=1e-6)


@pytest.mark.parametrize("clients, share, kept", [(10, 0.3, 7), (10, 0.0, 10), (7, 0.25, 5), (2, 0.3, 2), (1, 0.4, 1)])
@pytest.mark.parametrize("one", SORTING)
@pytest.mark.parametrize("block", [7, 1000])
def test_mixing_replaces_updates_by_the_means_of_their_neighbors(one, clients, share, kept, block, monkeypatch):
    monkeypatch.setattr(mean, "BLOCK", block)
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


@pytest.mark.parametrize("kind", [WeightedMean, ClippedMean])
def test_weighted_means_hold_one_decoded_update_at_a_time(kind):
    alive = []

    def decoded():
        assert all(reference() is None for reference in alive)
        vector = np.ones(D, np.float32)
        alive.append(weakref.ref(vector))
        return vector

    np.testing.assert_allclose(kind()([Update(decoded, float(np.sqrt(D)), 0.25)] * 4, D), 1, rtol=1e-6)
    assert len(alive) == 4


@pytest.mark.parametrize("one", SORTING)
def test_means_by_coordinates_sort_a_block_at_a_time(one, monkeypatch):
    monkeypatch.setattr(mean, "BLOCK", 64)
    shapes, of_sorted = [], type(one).of_sorted
    monkeypatch.setattr(type(one), "of_sorted", lambda self, block: shapes.append(block.shape) or of_sorted(self, block))
    one(updates_of(vectors_of(5)), D)
    assert shapes == [(5, 64)] * 4 + [(5, D % 64)]


def target(client, spread=0.3):
    """The honest clients' optima are around 1."""
    return 1 + np.float32(spread) * np.random.default_rng(client).standard_normal(D).astype(np.float32)


def train(one, memory, spec, lie, rounds=120, spread=0.3, **options):
    """The distance from the honest clients' mean optimum, relative to the first one."""
    start = np.zeros(D, np.float32)
    server = Server(start, CLIENTS, spec, memory=memory, mean=one, **options)
    clients = [Client(start, spec, memory=memory, number=number) for number in range(CLIENTS)]
    for _ in range(rounds):
        for number in server.begin_round():
            change = np.float32(0.2) * (clients[number].receive(server.message_for(number)) - target(number, spread))
            change = lie(change) if number < LIARS else change
            server.receive(number, clients[number].update_by(change, 1e30 if number < LIARS else 1.0))
        assert not server.end_round().rejected
    optimum = np.mean([target(client, spread) for client in range(LIARS, CLIENTS)], axis=0)
    return np.linalg.norm(server.model - optimum) / np.linalg.norm(optimum)


def flipped(change):
    """As far the wrong way as the norm check lets pass."""
    return -3 * change


@pytest.mark.parametrize("one", ROBUST)
@pytest.mark.parametrize(
    "memory, spec", [("none", "dense/raw"), ("residual", "dense/minmax:8"), ("ef21", "topk:0.3/rice/raw")]
)
def test_robust_means_go_where_honest_clients_want_to(one, memory, spec):
    assert train(one, memory, spec, flipped) < 0.2
    assert train(one, memory, spec, lambda change: change) < 0.2


@pytest.mark.parametrize("one", SORTING)
def test_mixing_loses_less_where_clients_are_unlike(one):
    alone, mixed = (train(each, "none", "dense/raw", flipped, spread=1.0) for each in (one, NearestNeighborMixing(one, 0.3)))
    assert mixed < alone / 2


def test_the_plain_mean_does_not_go_there():
    assert train(WeightedMean(), "none", "dense/raw", flipped, rounds=20) > 0.9
    claims = {"weights": "samples", "most_samples": 1e30}
    assert train(WeightedMean(), "none", "dense/raw", lambda change: -change, rounds=20, **claims) > 0.9


def test_with_the_clipped_mean_long_updates_count_no_more_than_others():
    def sideways(change):
        return np.full(D, 5 * np.linalg.norm(change) / np.sqrt(D), np.float32) * np.float32(-1)

    clipped, plain = (train(one, "none", "dense/raw", sideways, rounds=40) for one in (ClippedMean(), WeightedMean()))
    assert clipped < 0.8 < 1.2 < plain


@pytest.mark.parametrize("one", ROBUST)
def test_means_by_coordinates_refuse_what_they_mean_nothing_for(one):
    start = np.zeros(D, np.float32)
    for memory in ("residual", "none"):
        with pytest.raises(ConfigError, match=f"mean {type(one).__name__} with memory {memory!r} and 'topk"):
            Server(start, 3, "topk:0.1/rice/raw", memory=memory, mean=one)
    for weights in ({"weights": "samples", "most_samples": 5}, {"weights": dict.fromkeys(range(3), 1.0)}):
        with pytest.raises(ConfigError, match="no weights"):
            Server(start, 3, "dense/raw", memory="none", mean=one, **weights)
    server, client = Server(start, 3, "dense/raw", memory="none", mean=one), Client(start, "topk:0.1", memory="none")
    server.begin_round()
    with pytest.raises(Rejected, match="^sparse: 30 of 300 elements; "):
        server.receive(0, client.update(client.receive(server.message_for(0)) + vectors_of(1)[0], 1.0))


def test_means_that_make_no_sense():
    for share in (-0.1, 0.5, float("nan")):
        with pytest.raises(ConfigError, match="share"):
            TrimmedMean(share)
        with pytest.raises(ConfigError, match="share"):
            NearestNeighborMixing(Median(), share)
    for other in (WeightedMean(), Median, None, NearestNeighborMixing(Median(), 0.1)):
        with pytest.raises(ConfigError, match="NearestNeighborMixing: mean="):
            NearestNeighborMixing(other, 0.3)
    for radius in (0.0, -1.0, float("inf"), float("nan")):
        with pytest.raises(ConfigError, match="radius"):
            ClippedMean(radius)
    with pytest.raises(ConfigError, match="mean='median'; allowed"):
        Server(np.zeros(D), 3, mean="median")
