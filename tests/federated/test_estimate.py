"""Estimates that server and client share, bit for bit, with ef21."""

import dataclasses

import numpy as np
import pytest
from support.federated_training import CLIENTS, SPEC, D, agree, make, play, samples, start, target

from grace_ext import ConfigError
from grace_ext.federated import Client
from grace_ext.federated.messages import read_up


def test_the_server_and_a_client_agree_on_its_estimate():
    server, clients = make("ef21", sampled=3)
    for _ in range(12):
        play(server, clients)
    for number in server.begin_round():
        clients[number].receive(server.message_for(number))
        if server.estimate(number) is not None:
            assert clients[number].state_dict()["owed"].tobytes() == server.estimate(number).tobytes()


@pytest.mark.parametrize("round_", [None, 0])
def test_with_ef21_a_client_that_has_lost_its_state_begins_again(round_):
    """Whether it says that it has no model, or the one of the beginning."""
    server, clients = make("ef21", spec="topk:0.3/raw/raw")
    for _ in range(30):
        play(server, clients)
    clients[2] = Client(start(), "topk:0.3/raw/raw", memory="ef21", number=2)
    server.join(2, round_)
    assert play(server, clients).taken == list(range(CLIENTS))
    agree(server, clients)
    for _ in range(170):
        assert play(server, clients).taken == list(range(CLIENTS))
    optimum = np.average([target(client) for client in range(CLIENTS)], axis=0, weights=list(map(samples, range(CLIENTS))))
    assert np.linalg.norm(server.model - optimum) < 0.05 * np.linalg.norm(start() - optimum)


@pytest.mark.parametrize("arrives", [True, False])
def test_with_ef21_a_client_with_an_old_state_begins_again(arrives):
    """Whether the first update after it arrives or not."""
    server, clients = make("ef21")
    for _ in range(3):
        play(server, clients)
    state = clients[1].state_dict()
    for _ in range(3):
        play(server, clients)
    clients[1] = Client(start(), SPEC, memory="ef21", number=1)
    clients[1].load_state_dict(state)
    server.join(1, clients[1].round)
    play(server, clients, lambda number, message: message if number != 1 or arrives else None)
    assert set(play(server, clients).taken) == set(range(CLIENTS))
    agree(server, clients)
    with pytest.raises(ConfigError, match="lacks base"):
        clients[1].load_state_dict({key: value for key, value in state.items() if key != "base"})


def test_a_correction_of_what_the_server_does_not_have_is_refused():
    server, clients = make("ef21")
    for _ in range(3):
        play(server, clients)
    report = play(
        server,
        clients,
        lambda number, message: message if number else dataclasses.replace(read_up(message, D)[0], base=2).pack(),
    )
    assert report.rejected == {
        0: "estimate: a correction of the estimate after round 2; it is that after round 3: the "
        "client has to begin again with zeros, and base 0"
    }
    assert set(play(server, clients).taken) == set(range(CLIENTS))
    agree(server, clients)
