"""How much each client counts: as the server says, whatever clients claim."""

import dataclasses
import math

import numpy as np
import pytest
from support.federated_training import CLIENTS, D, play, start, train

from grace_ext import ConfigError
from grace_ext.federated import Client, Server
from grace_ext.federated.messages import read_up
from grace_ext.federated.weights import Weights


def claiming(claims):
    """A change for `play`: the clients in `claims` say that they have so many samples."""

    def forge(number, message):
        return dataclasses.replace(read_up(message, D)[0], samples=claims[number]).pack() if number in claims else message

    return forge


@pytest.mark.parametrize(
    "options, weights",
    [
        ({}, [1, 1, 1, 1, 1, 1]),
        ({"weights": "uniform"}, [1, 1, 1, 1, 1, 1]),
        ({"weights": "samples", "most_samples": 40.0}, [10, 20, 30, 40, 40, 40]),
        ({"weights": {0: 5, 1: 1, 2: 1, 3: 1, 4: 1, 5: 1e-3}}, [5, 1, 1, 1, 1, 1e-3]),
        ({"weights": dict.fromkeys(range(6), 1.7e308)}, [1, 1, 1, 1, 1, 1]),
        ({"weights": "samples", "most_samples": 1.7e308}, [0, 0, 0, 0, 1, 1]),
    ],
)
@pytest.mark.parametrize("memory", ["none", "ef21"])
def test_the_weights_are_the_servers(memory, options, weights):
    """Two clients claim as many samples as a float64 can say; the mean is that of the server's weights."""
    server = Server(start(), CLIENTS, "dense/raw", memory=memory, **options)
    clients = [Client(start(), "dense/raw", memory=memory, number=number) for number in range(CLIENTS)]
    for _ in range(2):
        expected = np.average([train(client, server.model) for client in range(CLIENTS)], axis=0, weights=weights)
        assert len(play(server, clients, claiming({4: 1.7e308, 5: 1.7e308})).taken) == CLIENTS
        np.testing.assert_allclose(server.model, expected, atol=1e-5)


@pytest.mark.parametrize(
    "wrong",
    [
        {"weights": "largest"},
        {"weights": "samples"},
        {"weights": {0: 1.0}},
        {"weights": dict.fromkeys(range(6), 0.0)},
        {"weights": dict.fromkeys(range(6), math.inf)},
        {"weights": dict.fromkeys(range(7), 1.0)},
        {"most_samples": 5},
        {"weights": "samples", "most_samples": 0},
        {"weights": "samples", "most_samples": math.inf},
    ],
)
def test_weights_that_make_no_sense(wrong):
    with pytest.raises(ConfigError, match="weights|most_samples"):
        Server(start(), CLIENTS, **wrong)


@pytest.mark.parametrize(
    "weights, cap, claimed, counts",
    [
        ("uniform", None, 50.0, 1.0),
        ("samples", 40.0, 50.0, 40.0),
        ("samples", 40.0, 30.0, 30.0),
        ({0: 3.0, 1: 5.0}, None, 50.0, 5.0),
    ],
)
def test_a_client_counts_as_much_as_the_server_says(weights, cap, claimed, counts):
    assert Weights(weights, cap, 2).weight(1, claimed) == counts
