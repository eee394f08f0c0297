"""The server's step with an outer optimizer."""

import numpy as np
import pytest

from grace_ext import ConfigError
from grace_ext.federated import Client, Server
from grace_ext.federated.outer_step import OuterStep
from grace_ext.outer import make_outer
from grace_ext.outer.sgd import SGD

SIZE, CLIENTS = 40, 4


def start():
    return np.random.default_rng(0).standard_normal(SIZE).astype(np.float32)


def optimum(client):
    return np.random.default_rng(client + 1).standard_normal(SIZE).astype(np.float32)


def play(server, clients, rounds):
    for _ in range(rounds):
        for client in server.begin_round():
            model = clients[client].receive(server.message_for(client))
            server.receive(client, clients[client].update(model - 0.2 * (model - optimum(client)), 1))
        server.end_round()
    return server.model.copy()


def setup(optimizer):
    server = Server(start(), CLIENTS, "dense/raw", optimizer=optimizer)
    return server, [Client(start(), "dense/raw", number=client) for client in range(CLIENTS)]


@pytest.mark.parametrize("optimizer", ["sgd", "nesterov:0.5:momentum=0.5", "adam:0.1", "adamw:0.1:steps=4", "yogi:0.1"])
def test_the_servers_model_goes_where_the_optimizer_takes_it(optimizer):
    model, outer = start(), make_outer(optimizer)
    state = outer.begin(SIZE)
    for number in range(1, 6):
        mean = np.mean([0.2 * (model - optimum(client)) for client in range(CLIENTS)], axis=0, dtype=np.float32)
        outer.step(model, mean, state, number)
    np.testing.assert_allclose(play(*setup(optimizer), rounds=5), model, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("optimizer", ["adam:0.1", "adamw:0.1:steps=5"])
def test_a_saved_server_goes_on_with_the_optimizers_state(tmp_path, optimizer):
    whole = play(*setup(optimizer), rounds=6)
    server, clients = setup(optimizer)
    play(server, clients, 3)
    server.save(tmp_path / "server.npz")
    again, _ = setup(optimizer)
    again.load(tmp_path / "server.npz")
    assert play(again, clients, 3).tobytes() == whole.tobytes()
    for other in ("sgd", "nesterov"):
        another, _ = setup(other)
        with pytest.raises(ConfigError, match="first_moment, second_moment"):
            another.load(tmp_path / "server.npz")
        assert another.round == 0


def test_a_round_that_could_not_end_leaves_the_state():
    outer = OuterStep("nesterov", 3)
    following = outer.made(np.zeros(3, np.float32), np.ones(3, np.float32))
    assert not outer.state_dict()["outer.velocity"].any() and following.state_dict()["outer.velocity"].all()


def test_something_else_is_refused():
    with pytest.raises(ConfigError, match="optimizer=3; allowed"):
        Server(start(), CLIENTS, optimizer=3)


def test_an_optimizer_without_arrays_goes_on_with_the_number_of_its_step():
    class Falling(SGD):
        def step(self, values, change, state, number):
            super().step(values, change / np.float32(number), state, number)

    step, model = OuterStep(Falling(), SIZE), start()
    for _ in range(3):
        step = step.made(model, np.ones(SIZE, np.float32))
    again, other = OuterStep(Falling(), SIZE), model.copy()
    again.load_state_dict(step.state_dict())
    step.made(model, np.ones(SIZE, np.float32))
    again.made(other, np.ones(SIZE, np.float32))
    assert model.tobytes() == other.tobytes()
