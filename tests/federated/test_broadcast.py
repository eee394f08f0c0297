"""Clients that missed rounds, or come with nothing, get what they lack."""

from support.federated_training import CLIENTS, SPEC, D, make, play, start

from grace_ext.federated import Client


def test_who_has_missed_rounds_catches_up():
    server, clients = make(sampled=CLIENTS, keep=4)
    play(server, clients)
    sizes = []
    for away in (2, 3, 7):
        server.leave(5)
        for _ in range(away):
            report = play(server, clients)
            assert 5 not in report.taken and 5 not in report.missing
        server.join(5, clients[5].round)
        server.begin_round()
        message = server.message_for(5)
        sizes.append(message.size)
        assert clients[5].receive(message).tobytes() == server.told.known.tobytes()
        server.end_round()
    assert sizes[0] < sizes[1] < 4 * D < sizes[2]  # the last one is the whole model


def test_what_was_missed_is_never_more_than_the_model():
    server, clients = make("none", spec="dense/raw", sampled=2)
    for _ in range(12):
        report = play(server, clients)
        assert len(report.taken) == 2 and report.sent < 2 * (4 * D + 100)


def test_who_comes_with_nothing_gets_the_model():
    server, clients = make()
    for _ in range(3):
        play(server, clients)
    server.join(2)
    clients[2] = Client(start(), SPEC, number=2)
    assert set(play(server, clients).taken) == set(range(CLIENTS))
