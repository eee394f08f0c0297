"""Updates much larger than those of others are refused."""

import math

import numpy as np
import pytest
from support.federated_training import CLIENTS, D, forged, make, play, start

from grace_ext.federated import Client, Server


@pytest.mark.parametrize("own", [False, True])
def test_where_clients_choose_their_densities_norms_are_judged_by_how_many_values_there_are(own):
    """After rounds of one value each, one client sends all 400, which have 20 times the norm. Another one sends one value as
    before, of 25 times the norm."""
    random = np.random.default_rng(0)
    server = Server(start(), 3, "topk:0.1/rice/raw")
    server.own_densities = own
    clients = [Client(start(), "topk:0.001/raw/raw", memory="none", number=number) for number in range(3)]
    for last in (False, False, True):
        for client, density in zip(server.begin_round(), (0.001, 1.0 if last else 0.001, 0.001), strict=True):
            clients[client].receive(server.message_for(client))
            change = random.choice([-1.0, 1.0], D).astype(np.float32) * (25 if last and client == 2 else 1)
            server.receive(client, clients[client].update_by(change, 1.0, f"topk:{density}/raw/raw"))
        report = server.end_round()
        assert report.taken == (([0, 1] if own else [0]) if last else [0, 1, 2])
    assert server.rejections == {"norm": 1 if own else 2}


def test_clients_that_send_zeros_do_not_switch_the_norm_check_off():
    server = Server(start(), CLIENTS, "dense/raw", memory="none")
    clients = [Client(start(), "dense/raw", memory="none", number=number) for number in range(CLIENTS)]
    changes = dict.fromkeys(range(CLIENTS), 0.0)

    def round_of():
        for number in server.begin_round():
            clients[number].receive(server.message_for(number))
            server.receive(number, clients[number].update_by(np.full(D, changes[number], np.float32), 1.0))
        return server.end_round()

    assert len(round_of().taken) == CLIENTS
    changes[5] = 1e6
    for _ in range(4):  # one client alone cannot say what is usual, however often it tries
        report = round_of()
        assert set(report.rejected) == {5} and "nothing to compare it with" in report.rejected[5]
    np.testing.assert_array_equal(server.model, start())
    changes |= {0: 1.0, 1: 1.0, 2: 1.0}
    assert round_of().taken == [0, 1, 2, 3, 4]
    changes |= {3: 5.0}
    assert round_of().taken == [0, 1, 2, 3, 4] and server.rejections == {"norm": 6}


def test_what_is_too_large_does_not_decide_on_what_others_may_send():
    """Client 2 is refused with and without the update of client 3, which takes the median up from 1 to 2.5."""
    taken = []
    for longest in (None, 1e6):
        server = Server(start(), 4, "dense/raw", memory="none", norm_limit=2.0)
        clients = [Client(start(), "dense/raw", memory="none", number=number) for number in range(4)]
        for number, norm in zip(server.begin_round(), (1.0, 1.0, 4.0, longest), strict=True):
            clients[number].receive(server.message_for(number))
            if norm is not None:
                server.receive(number, clients[number].update_by(np.eye(1, D, dtype=np.float32)[0] * np.float32(norm), 1.0))
        taken.append(server.end_round().taken)
    assert taken == [[0, 1], [0, 1]]


def test_whose_update_could_not_be_compared_is_saved_and_counts_once_there_are_others(tmp_path):
    """Clients that begin to train one after the other, after rounds in which all sent zeros."""
    server = Server(start(), 3, "dense/raw", memory="none", sampled=1)
    clients = [Client(start(), "dense/raw", memory="none", number=number) for number in range(3)]
    taken = []
    for number in range(40):
        (chosen,) = server.begin_round()
        clients[chosen].receive(server.message_for(chosen))
        server.receive(chosen, clients[chosen].update_by(np.full(D, number >= 10, np.float32), 1.0))
        taken += server.end_round().taken
        server.save(tmp_path / "server.npz")
        server = Server(start(), 3, "dense/raw", memory="none", sampled=1)
        server.load(tmp_path / "server.npz")
    assert 30 < len(taken) < 40 and set(taken) == {0, 1, 2}


def test_the_norm_check_can_be_switched_off_by_its_option_only():
    server, clients = make(norm_limit=math.inf)
    for _ in range(3):
        play(server, clients)
    report = play(server, clients, lambda number, message: message if number else forged("norm", message))
    assert len(report.taken) == CLIENTS
