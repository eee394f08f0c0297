"""What holds for every mean, in training and in memory."""

import weakref

import numpy as np
import pytest
from support.federated_means import SORTING, D, flipped, train, updates_of, vectors_of

from grace_ext import ConfigError
from grace_ext.federated import Client, Rejected, Server
from grace_ext.means import ClippedMean, Median, NearestNeighborMixing, SenderMean, TrimmedMean, Update, WeightedMean, base

ROBUST = [*SORTING, *(NearestNeighborMixing(one, 0.3) for one in SORTING)]


@pytest.mark.parametrize("kind", [WeightedMean, SenderMean, ClippedMean])
def test_weighted_means_hold_one_decoded_update_at_a_time(kind):
    alive = []

    def decoded():
        assert all(reference() is None for reference in alive)
        vector = np.ones(D, np.float32)
        alive.append(weakref.ref(vector))
        return vector

    np.testing.assert_allclose(kind()([Update(decoded, float(np.sqrt(D)), 0.25, lambda: False)] * 4, D), 1, rtol=1e-6)
    assert len(alive) == 4


@pytest.mark.parametrize("one", SORTING)
def test_means_by_coordinates_sort_a_block_at_a_time(one, monkeypatch):
    monkeypatch.setattr(base, "BLOCK", 64)
    shapes, of_sorted = [], type(one).of_sorted
    monkeypatch.setattr(type(one), "of_sorted", lambda self, block: shapes.append(block.shape) or of_sorted(self, block))
    one(updates_of(vectors_of(5)), D)
    assert shapes == [(5, 64)] * 4 + [(5, D % 64)]


@pytest.mark.parametrize("one", ROBUST)
@pytest.mark.parametrize(
    "memory, spec", [("none", "dense/raw"), ("residual", "dense/minmax:8"), ("ef21", "topk:0.3/rice/raw")]
)
def test_robust_means_go_where_honest_clients_want_to(one, memory, spec):
    assert train(one, memory, spec, flipped) < 0.2
    assert train(one, memory, spec, lambda change: change) < 0.2


def test_the_plain_mean_does_not_go_there():
    assert train(WeightedMean(), "none", "dense/raw", flipped, rounds=20) > 0.9
    claims = {"weights": "samples", "most_samples": 1e30}
    assert train(WeightedMean(), "none", "dense/raw", lambda change: -change, rounds=20, **claims) > 0.9


@pytest.mark.parametrize("one", ROBUST)
def test_means_by_coordinates_refuse_what_they_mean_nothing_for(one):
    start = np.zeros(D, np.float32)
    for weights in ({"weights": "samples", "most_samples": 5}, {"weights": dict.fromkeys(range(3), 1.0)}):
        with pytest.raises(ConfigError, match="takes no weights"):
            Server(start, 3, "dense/raw", memory="none", mean=one, **weights)
    server, client = Server(start, 3, "dense/raw", memory="none", mean=one), Client(start, "topk:0.1", memory="none")
    server.begin_round()
    with pytest.raises(Rejected, match="^sparse: 30 of 300 elements; "):
        server.receive(0, client.update(client.receive(server.message_for(0)) + vectors_of(1)[0], 1.0))


@pytest.mark.parametrize("one", ROBUST)
@pytest.mark.parametrize("memory", ["residual", "none"])
def test_the_model_may_be_sent_sparsely_where_updates_have_to_be_dense(one, memory):
    server = Server(np.zeros(D, np.float32), 3, "topk:0.1/rice/raw", memory=memory, mean=one)
    clients = [Client(np.zeros(D, np.float32), "dense/raw", memory=memory, number=number) for number in range(3)]
    for number in server.begin_round():
        trained = clients[number].receive(server.message_for(number)) + vectors_of(3)[number]
        server.receive(number, clients[number].update(trained, 1.0))
    report = server.end_round()
    assert report.taken == [0, 1, 2] and server.model.any()


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
