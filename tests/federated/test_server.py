"""Federated server and clients without a network: what they know of each other, what is owed, who is not believed."""

import copy
import math

import numpy as np
import pytest
from support.federated_training import CLIENTS, SPEC, D, forged, make, play, samples, start, target, train, up_header

import grace_ext
from grace_ext import ConfigError
from grace_ext.federated import Client, Rejected, Server


@pytest.mark.parametrize("memory, sampled", [("residual", None), ("residual", 3), ("ef21", None), ("ef21", 3)])
def test_the_model_goes_where_the_weighted_mean_is(memory, sampled):
    server, clients = make(memory, sampled=sampled)
    for _ in range(200):
        report = play(server, clients)
        assert len(report.taken) == (sampled or CLIENTS) and not report.missing and not report.rejected
    weights = np.array([samples(client) for client in range(CLIENTS)])
    optimum = np.average([target(client) for client in range(CLIENTS)], axis=0, weights=weights)
    distance = np.linalg.norm(server.model - optimum) / np.linalg.norm(start() - optimum)
    assert distance < (0.1 if sampled is None else 0.5), distance


def test_without_compression_it_is_fedavg():
    server, clients = make("none", spec="dense/raw", sampled=4)
    model = start()
    for _ in range(5):
        chosen = server.begin_round()
        for number in chosen:
            server.receive(
                number,
                clients[number].update(train(number, clients[number].receive(server.message_for(number))), samples(number)),
            )
        total = sum(samples(number) for number in chosen)
        model = sum(np.float32(samples(number) / total) * train(number, model) for number in chosen)
        server.end_round()
        np.testing.assert_allclose(server.model, model, atol=1e-5)


def test_nothing_is_lost_on_the_way_up():
    """What a client has trained is what the server got, and what is still owed."""
    server, (client, *_) = make()
    given, got = np.zeros(D), np.zeros(D)
    for _ in range(20):
        server.begin_round()
        model = client.receive(server.message_for(0))
        trained = train(0, model)
        message = client.update(trained, 1)
        given += model - trained
        got += grace_ext.decompress(message[up_header() :], D)
        server.receive(0, message)
        server.end_round()
    server.begin_round()
    client.receive(server.message_for(0))
    np.testing.assert_allclose(got + client.state_dict()["owed"], given, atol=1e-3)


@pytest.mark.parametrize("memory", ["residual", "ef21"])
def test_an_update_that_was_not_taken_is_still_owed(memory):
    server, clients = make(memory)
    play(server, clients)
    play(server, clients, lambda number, message: message if number else None)  # that of client 0 does not arrive
    client = clients[0]
    before = client.state_dict()["owed"]
    server.begin_round()
    client.receive(server.message_for(0))
    owed = client.state_dict()["owed"]
    np.testing.assert_array_equal(owed, before)
    if memory == "residual":  # all of the change as well, not only what the container left out
        assert np.count_nonzero(owed) > 0.99 * D
    else:
        np.testing.assert_array_equal(owed, server.estimate(0))


@pytest.mark.parametrize("memory, others", [("ef21", "residual"), ("ef21", "none"), ("residual", "ef21"), ("none", "ef21")])
def test_clients_and_server_have_the_same_idea_of_what_containers_are(memory, others):
    server, _ = make(memory)
    report = play(server, [Client(start(), SPEC, memory=others, number=number) for number in range(CLIENTS)])
    assert not report.taken and all(said.startswith("estimate: ") for said in report.rejected.values())
    np.testing.assert_array_equal(server.model, start())


@pytest.mark.parametrize("memory", ["none", "ef21"])
@pytest.mark.parametrize("longest", [2.0**100, 3e38])
def test_no_update_takes_the_model_to_inf(memory, longest):
    """Whatever the limit of norms, and where nothing is known that an update could be compared with."""
    server = Server(start(), 2, "dense/raw", memory=memory, norm_limit=math.inf)
    clients = [Client(start(), "dense/raw", memory=memory, number=number) for number in range(2)]
    with np.errstate(all="raise", under="ignore"):
        for _ in range(5):
            for number in server.begin_round():
                clients[number].receive(server.message_for(number))
                change = np.zeros(D, np.float32)
                change[number] = longest * (-1) ** server.round if memory == "ef21" else longest
                message = clients[number].update_by(change, 1.0)
                if longest > 2**100:
                    with pytest.raises(Rejected, match="norm: "):
                        server.receive(number, message)
                else:
                    server.receive(number, message)
            report = server.end_round()
            assert np.isfinite(server.model).all() and math.isfinite(report.norm)


def test_a_round_without_updates_changes_nothing():
    server, clients = make()
    play(server, clients)
    before = server.model.copy()
    report = play(server, clients, lambda number, message: None)
    assert report.missing == list(range(CLIENTS)) and not report.taken
    np.testing.assert_array_equal(server.model, before)
    for client in range(CLIENTS):
        server.leave(client)
    assert server.begin_round() == []
    assert server.end_round().taken == []


@pytest.mark.parametrize("memory", ["residual", "ef21"])
def test_a_saved_server_goes_on_as_if_nothing_had_happened(tmp_path, memory):
    server, clients = make(memory, sampled=4, keep=3)
    for _ in range(4):
        play(server, clients, lambda number, message: forged("cut", message) if number == 3 else message)
    server.save(tmp_path / "server.npz")
    saved = copy.deepcopy(clients)
    reports = [play(server, clients) for _ in range(4)]
    other, _ = make(memory, sampled=4, keep=3)
    other.load(tmp_path / "server.npz")
    assert [play(other, saved) for _ in range(4)] == reports
    assert other.model.tobytes() == server.model.tobytes() and other.rejections == server.rejections
    with pytest.raises(ConfigError, match="clients"):
        Server(start(), CLIENTS + 1).load(tmp_path / "server.npz")
    np.savez(
        tmp_path / "older.npz",
        **{name: value for name, value in np.load(tmp_path / "server.npz").items() if name not in ("asked", "unscaled")},
    )
    with pytest.raises(ConfigError, match="lacks asked, unscaled"):
        other.load(tmp_path / "older.npz")


@pytest.mark.parametrize(
    "wrong", [{"sampled": 0}, {"sampled": 7}, {"memory": "dgc"}, {"norm_limit": 1}, {"keep": 0}, {"staleness": -1}]
)
def test_options_that_make_no_sense(wrong):
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        Server(start(), CLIENTS, **wrong)


def test_rounds_begin_and_end_in_turn():
    server, _ = make()
    with pytest.raises(ConfigError, match="begun"):
        server.end_round()
    server.begin_round()
    with pytest.raises(ConfigError, match="ended"):
        server.begin_round()
    with pytest.raises(ConfigError, match="ended"):
        server.save("nowhere")
    server, clients = make()
    for _ in range(2):
        with pytest.raises(ConfigError, match="no round has begun"):
            server.message_for(0)
        assert play(server, clients).taken == list(range(CLIENTS))


def test_who_is_asked_may_be_chosen_elsewhere():
    server, clients = make(sampled=3)
    with pytest.raises(ConfigError, match="no round has begun"):
        server.choose([0])
    server.begin_round()
    with pytest.raises(ConfigError, match=rf"clients \[-1, {CLIENTS}\]; allowed: 0 to {CLIENTS - 1}"):
        server.choose([CLIENTS, 1, -1])
    server.choose([4, 1])
    model = clients[1].receive(server.message_for(1))
    server.receive(1, clients[1].update(model, 1))
    report = server.end_round()
    assert (report.taken, report.missing) == ([1], [4])


@pytest.mark.parametrize(
    "spec, says", [("randomk:0.1:unbiased=true", "'ef21' would correct"), ("powersgd:4", "no container")]
)
def test_compressions_that_cannot_tell_the_model(spec, says):
    with pytest.raises(ConfigError, match=says):
        Server(start(), CLIENTS, spec, memory="none")
    server, clients = make("none")
    with pytest.raises(ConfigError, match=says):
        server.begin_round(spec)
    assert server.round == 0 and play(server, clients).taken == list(range(CLIENTS))


@pytest.mark.parametrize("memory", ["residual", "ef21", "none"])
def test_a_round_whose_end_has_failed_can_be_ended_again(memory):
    """As if nothing had happened, with an optimizer that has changed the model before it fails, and updates that are refused."""
    failing = []

    def optimizer(model, change):
        model -= change
        change[:] = np.nan
        if failing:
            raise RuntimeError(failing.pop())

    (server, clients), (twin, others) = (make(memory, optimizer=optimizer) for _ in range(2))
    for round_ in range(6):
        for pair, mine in ((server, clients), (twin, others)):
            for number in pair.begin_round():
                trained = train(number, mine[number].receive(pair.message_for(number)))
                large = 1000 if number == 2 and round_ in (0, 3) else 1
                change = (mine[number].model.known - trained) * np.float32(large)
                pair.receive(number, mine[number].update_by(change, samples(number)))
        failing.append("once")
        with pytest.raises(RuntimeError, match="once"):
            server.end_round()
        assert server.end_round() == twin.end_round()
        assert server.model.tobytes() == twin.model.tobytes() and server.rejections == twin.rejections
    assert server.rejections["norm"]


@pytest.mark.parametrize("memory", ["residual", "ef21"])
def test_a_state_that_does_not_fit_leaves_the_server_as_it_was(tmp_path, memory):
    server, clients = make(memory)
    kept = []
    play(server, clients, lambda number, message: message if number else kept.append(message))
    server.receive(0, kept[0])
    server.save(tmp_path / "server.npz")
    state = dict(np.load(tmp_path / "server.npz"))
    other, its = make(memory)
    play(other, its)
    other.save(tmp_path / "before.npz")
    wrong = [
        ({"memory": np.array("none")}, "memory 'none'"),
        ({"told": np.zeros(D + 1, np.float32)}, "elements"),
        ({"taken": np.zeros(CLIENTS + 1, np.int64)}, "clients"),
        ({"blob.1": None}, "blob.1"),
        ({"samples.1": None} if memory == "ef21" else {"asked": np.zeros((0, 2), np.int64)}, "lacks a part"),
        ({"came.0": state["came.0"][:-1]}, "not acceptable: malformed"),
        *([({"estimate.1": np.zeros(1, np.float32)}, "elements")] if memory == "ef21" else []),
    ]
    for change, says in wrong:
        left = {key: value for key, value in (state | change).items() if value is not None}
        np.savez(tmp_path / "wrong.npz", **left)
        with pytest.raises(ConfigError, match=says):
            other.load(tmp_path / "wrong.npz")
        other.save(tmp_path / "after.npz")
        before, after = (np.load(tmp_path / f"{name}.npz") for name in ("before", "after"))
        assert before.files == after.files and all(np.array_equal(before[key], after[key]) for key in before.files)


def test_a_state_can_be_loaded_within_a_round(tmp_path):
    server, clients = make()
    play(server, clients)
    server.save(tmp_path / "server.npz")
    server.begin_round()
    server.message_for(0)
    with pytest.raises(Rejected):
        server.receive(0, np.empty(0, np.uint8))
    server.load(tmp_path / "server.npz")
    fresh, _ = make()
    fresh.load(tmp_path / "server.npz")
    report = play(server, copy.deepcopy(clients))
    assert report == play(fresh, clients) and report.taken == list(range(CLIENTS))
