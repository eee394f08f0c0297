"""Updates that come late, broken or from nobody."""

import numpy as np
import pytest
from support.federated_training import CLIENTS, agree, forged, make, play, samples, train

from grace_ext import ConfigError
from grace_ext.federated import Rejected


def late_by(rounds, server, clients, slow=5):
    """Rounds in which a client is asked in the first one only, and its update comes after the last one."""
    kept = []
    play(server, clients, lambda number, message: message if number != slow else kept.append(message))
    asked = server.round
    while server.round < asked + rounds - 1:
        for number in server.begin_round():
            if number != slow:
                model = clients[number].receive(server.message_for(number))
                server.receive(number, clients[number].update(train(number, model), samples(number)))
        server.end_round()
    return kept[0]


@pytest.mark.parametrize("memory", ["residual", "ef21"])
@pytest.mark.parametrize("rounds, within", [(1, False), (1, True), (3, False), (3, True)])
def test_a_late_update_counts_in_the_round_in_which_it_comes(tmp_path, memory, rounds, within):
    """Between rounds, or within one; a server saved and loaded in between goes on as if nothing had happened."""
    server, clients = make(memory, staleness=3)
    play(server, clients)
    update = late_by(rounds, server, clients)
    if within:
        server.begin_round()
        server.receive(5, update)
        assert server.end_round().stale == {5: rounds}
    else:
        server.receive(5, update)
        server.save(tmp_path / "server.npz")
        server, _ = make(memory, staleness=3)
        server.load(tmp_path / "server.npz")
        report = play(server, clients)
        assert report.taken == list(range(CLIENTS)) and report.stale == {5: rounds}
    report = play(server, clients)
    assert report.taken == list(range(CLIENTS)) and report.stale == {} and not server.rejections
    if memory == "ef21":
        agree(server, clients)


def test_a_late_update_counts_once_and_its_client_is_not_asked_in_that_round():
    server, clients = make()
    update = late_by(2, server, clients)
    server.receive(5, update)
    with pytest.raises(Rejected, match="not expected"):
        server.receive(5, update)
    assert server.begin_round() == [0, 1, 2, 3, 4]
    with pytest.raises(ConfigError, match="has sent its update"):
        server.message_for(5)
    assert server.end_round().taken == [5]
    with pytest.raises(Rejected, match="not expected"):
        server.receive(5, update)


@pytest.mark.parametrize("staleness, rounds", [(0, 1), (2, 3)])
def test_a_late_update_beyond_the_staleness_is_still_owed(staleness, rounds):
    server, clients = make(staleness=staleness)
    update = late_by(rounds, server, clients)
    owed = clients[5]._unanswered.if_rejected
    with pytest.raises(Rejected, match=f"late: .* by at most {staleness} rounds"):
        server.receive(5, update)
    server.begin_round()
    clients[5].receive(server.message_for(5))
    np.testing.assert_array_equal(clients[5].state_dict()["owed"], owed)


def test_an_update_of_a_round_before_the_last_message_is_late():
    server, clients = make()
    update = late_by(1, server, clients)
    server.begin_round()
    server.message_for(5)
    with pytest.raises(Rejected, match="late: an update of round 1; one of round 2 is expected"):
        server.receive(5, update)


@pytest.mark.parametrize(
    "what, reason",
    [
        ("malformed", "malformed"),
        ("empty", "malformed"),
        ("cut", "malformed"),
        ("bit", "malformed"),
        ("other size", "malformed"),
        ("huge", "oversized"),
        ("oversized", "oversized"),
        ("late", "late"),
        ("no samples", "samples"),
        ("endless samples", "samples"),
        ("not finite", "not finite"),
        ("norm", "norm"),
    ],
)
def test_a_broken_client_is_not_believed_and_training_goes_on(what, reason):
    server, clients = make()
    for _ in range(3):
        play(server, clients)
    report = play(server, clients, lambda number, message: forged(what, message) if number == 1 else message)
    assert set(report.rejected) == {1} and report.rejected[1].startswith(reason)
    assert report.taken == [0, 2, 3, 4, 5]
    assert server.rejections == {reason: 1}
    assert np.isfinite(server.model).all() and np.abs(server.model).max() < 10
    assert set(play(server, clients).taken) == set(range(CLIENTS))
