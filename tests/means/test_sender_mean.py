"""The mean of each element over those that have sent it."""

import numpy as np
import pytest
from support.federated_means import D, updates_of, vectors_of

from grace_ext.federated import Client, Server
from grace_ext.means import SenderMean, Update, WeightedMean


def sparse_vectors(count):
    vectors = vectors_of(count)
    vectors[np.random.default_rng(1).random(vectors.shape) < 0.7] = 0
    return vectors


def slow(vectors, shares, dense):
    """Element by element, in float64."""
    found = []
    for number in range(D):
        sent = [
            (float(v[number]), s) for v, s, all_ in zip(vectors, shares, dense, strict=True) if v[number] or all_[number]
        ]
        weight = sum(share for _, share in sent)
        found.append(sum(value * share for value, share in sent) / weight if weight else 0.0)
    return found


@pytest.mark.parametrize("shares", [[0.25] * 4, [0.1, 0.2, 0.3, 0.4]])
def test_each_element_is_the_mean_of_those_that_have_sent_it(shares):
    vectors, dense = sparse_vectors(4), np.zeros((4, D), bool)
    dense[1, : D // 2], dense[2] = True, True
    masks = [False, dense[1], True, False]
    given = [
        Update(lambda vector=vector: vector, float(np.linalg.norm(vector)), share, lambda mask=mask: mask)
        for vector, share, mask in zip(vectors, shares, masks, strict=True)
    ]
    np.testing.assert_allclose(SenderMean()(given, D), slow(vectors, shares, dense), rtol=1e-5, atol=1e-6)


def test_what_nobody_has_sent_does_not_move():
    vectors = sparse_vectors(3)
    vectors[:, :5] = 0
    found = SenderMean()(updates_of(vectors), D)
    assert not found[:5].any() and found[5:].any()


@pytest.mark.parametrize(
    "memory, spec, is_weighted",
    [
        ("residual", "topk:0.1/rice/raw", False),
        ("none", "dense/terngrad", True),
        ("ef21", "topk:0.1", True),
        ("none", "dct:4/topk:0.5:per=chunk", True),
    ],
)
def test_a_server_takes_it_of_what_is_sent_sparsely_and_the_weighted_mean_of_the_rest(memory, spec, is_weighted):
    models = {}
    for mean in (SenderMean(), WeightedMean()):
        start = np.zeros(D, np.float32)
        server = Server(start, 3, "dense/raw", memory=memory, mean=mean, weights="samples", most_samples=9)
        clients = [Client(start, spec, memory=memory, number=number) for number in range(3)]
        for number in server.begin_round():
            trained = clients[number].receive(server.message_for(number)) + vectors_of(3)[number]
            server.receive(number, clients[number].update(trained, number + 1))
        server.end_round()
        models[type(mean)] = server.model.copy()
    sender, weighted = models[SenderMean], models[WeightedMean]
    if is_weighted:
        np.testing.assert_allclose(sender, weighted, rtol=1e-5, atol=1e-6)
        return
    sent = np.zeros((3, D))
    for vector, row in zip(vectors_of(3), sent, strict=True):
        largest = np.abs(vector).argsort()[-D // 10 :]
        row[largest] = vector[largest]
    np.testing.assert_allclose(sender, slow(sent, [1 / 6, 2 / 6, 3 / 6], np.zeros((3, D), bool)), rtol=1e-5, atol=1e-6)
