"""Updates of clients of which some lie."""

import numpy as np

from grace_ext.federated import Client, Server
from grace_ext.means import Median, TrimmedMean, Update

D, CLIENTS, LIARS = 300, 10, 3  # those with the lowest numbers lie


SORTING = [Median(), TrimmedMean(0.3)]


def updates_of(vectors, shares=None):
    shares = [1 / len(vectors)] * len(vectors) if shares is None else shares
    return [
        Update(lambda vector=vector: vector, float(np.linalg.norm(vector)), share, lambda: False)
        for vector, share in zip(vectors, shares, strict=True)
    ]


def vectors_of(count, seed=0):
    return np.random.default_rng(seed).standard_normal((count, D)).astype(np.float32)


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
