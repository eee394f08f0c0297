"""Federated training of a vector to the mean of the clients' targets, without a network."""

import numpy as np

import grace_ext
from grace_ext.federated import Client, Rejected, Server
from grace_ext.federated.messages import Up, largest, read_up

D, CLIENTS = 400, 6


SPEC = "topk:0.1/rice/qsgd:8"


def target(client):
    return np.random.default_rng(100 + client).standard_normal(D).astype(np.float32)


def samples(client):
    return 10.0 * (client + 1)


def train(client, model, rate=0.05):
    """Local training: some steps towards this client's own optimum."""
    return model - np.float32(rate) * (model - target(client))


def start():
    return np.random.default_rng(1).standard_normal(D).astype(np.float32)


def make(memory="residual", spec=SPEC, sampled=None, **options):
    options = {"weights": "samples", "most_samples": samples(CLIENTS - 1), **options}
    server = Server(start(), CLIENTS, spec, sampled=sampled, memory=memory, **options)
    return server, [Client(start(), spec, memory=memory, number=number) for number in range(CLIENTS)]


def play(server, clients, change=None):
    """A round. change(client, message) -> what arrives, or None."""
    for number in server.begin_round():
        client = clients[number]
        model = client.receive(server.message_for(number))
        assert model.tobytes() == server.told.known.tobytes()
        message = client.update(train(number, model), samples(number))
        message = change(number, message) if change else message
        if message is not None:
            try:
                server.receive(number, message)
            except Rejected:
                continue
    return server.end_round()


def up_header():
    return Up(1, 1.0, np.empty(0, np.uint8)).pack().size


def agree(server, clients):
    """Whether the server's estimate of each client's update is that client's own, to the bit, in the round that begins."""
    for number in server.begin_round():
        clients[number].receive(server.message_for(number))
        known = server.estimate(number) if clients[number].told.any() else np.zeros(D, np.float32)
        assert clients[number].told.tobytes() == known.tobytes(), number
    server.end_round()


def forged(what, honest):
    """A broken or hostile client's message."""
    round_ = read_up(honest, D)[0].round
    blob = honest[up_header() :]

    def compressed(values):
        return grace_ext.compressor(SPEC).compress(values.astype(np.float32))

    return {
        "malformed": lambda: np.random.default_rng(0).integers(0, 256, 300).astype(np.uint8),
        "empty": lambda: np.empty(0, np.uint8),
        "cut": lambda: honest[:-3],
        "bit": lambda: honest ^ (np.arange(honest.size) == 40).astype(np.uint8),
        "other size": lambda: Up(round_, 1.0, compressed(np.ones(D + 1))).pack(),
        "huge": lambda: Up(round_, 1.0, compressed(np.ones(10_000_000))).pack(),
        "oversized": lambda: np.zeros(largest(D) + 1, np.uint8),
        "late": lambda: Up(round_ - 1, 1.0, blob).pack(),
        "no samples": lambda: Up(round_, 0.0, blob).pack(),
        "endless samples": lambda: Up(round_, float("inf"), blob).pack(),
        "not finite": lambda: Up(round_, 1.0, compressed(np.full(D, np.nan))).pack(),
        "norm": lambda: Up(round_, 1.0, compressed(1e6 * np.ones(D))).pack(),
    }[what]()
