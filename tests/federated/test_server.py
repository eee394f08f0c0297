"""Federated server and clients without a network: what they know of each other, what is owed, who is not believed."""

import copy
import dataclasses
import math

import numpy as np
import pytest

import grace_ext
from grace_ext import ConfigError, ContainerError
from grace_ext.federated import Client, Rejected, Server
from grace_ext.federated.messages import FRESH, Down, Up, largest, read_up
from grace_ext.pipeline import container

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


def up_header():
    return Up(1, 1.0, np.empty(0, np.uint8)).pack().size


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


def test_the_server_and_a_client_agree_on_its_estimate():
    server, clients = make("ef21", sampled=3)
    for _ in range(12):
        play(server, clients)
    for number in server.begin_round():
        clients[number].receive(server.message_for(number))
        if server.estimate(number) is not None:
            assert clients[number].state_dict()["owed"].tobytes() == server.estimate(number).tobytes()


def agree(server, clients):
    """Whether the server's estimate of each client's update is that client's own, to the bit, in the round that begins."""
    for number in server.begin_round():
        clients[number].receive(server.message_for(number))
        known = server.estimate(number) if clients[number].told.any() else np.zeros(D, np.float32)
        assert clients[number].told.tobytes() == known.tobytes(), number
    server.end_round()


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


@pytest.mark.parametrize("memory, others", [("ef21", "residual"), ("ef21", "none"), ("residual", "ef21"), ("none", "ef21")])
def test_clients_and_server_have_the_same_idea_of_what_containers_are(memory, others):
    server, _ = make(memory)
    report = play(server, [Client(start(), SPEC, memory=others, number=number) for number in range(CLIENTS)])
    assert not report.taken and all(said.startswith("estimate: ") for said in report.rejected.values())
    np.testing.assert_array_equal(server.model, start())


def test_messages_of_another_version_are_refused():
    server, clients = make()
    server.begin_round()
    down = server.message_for(0)
    up = clients[0].update(clients[0].receive(down), 1.0)
    for message in (down, up):
        assert bytes(message[:4]) == b"GXF2"
        message[3] = ord("1")
        length = (up_header() if message is up else Down(1, 0, 0, []).pack().size) - 4
        message[length : length + 4] = np.frombuffer(container.checksum(message[:length]), np.uint8)
    with pytest.raises(ContainerError, match="version '1'"):
        clients[0].receive(down)
    with pytest.raises(Rejected, match="version '1'"):
        server.receive(0, up)


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
    owed = clients[5]._open[2]
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


def test_who_comes_with_nothing_gets_the_model():
    server, clients = make()
    for _ in range(3):
        play(server, clients)
    server.join(2)
    clients[2] = Client(start(), SPEC, number=2)
    assert set(play(server, clients).taken) == set(range(CLIENTS))


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


@pytest.mark.parametrize("wrong", [None, "GXF2", 5, [1, 2], np.zeros(100), np.zeros((2, 40), np.uint8), np.array(None)])
def test_what_is_no_buffer_of_bytes_is_refused(wrong):
    server, (client, *_) = make()
    server.begin_round()
    down = server.message_for(0)
    with pytest.raises(Rejected, match="malformed: "):
        server.receive(0, wrong)
    with pytest.raises(ContainerError):
        client.receive(wrong)
    client.receive(down.tobytes())
    server.receive(0, client.update(start(), 1.0).tobytes())
    assert server.end_round().taken == [0]


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


@pytest.mark.parametrize("spec", ["panthalia", "dct:64/topk:1.0:per=chunk/raw/raw", "dct:256/topk:1.0/raw/raw"])
@pytest.mark.parametrize("d", [1, 10, 5000])
def test_small_models_may_have_transforms_that_fill_them_up(spec, d):
    """The DCT of ten elements has as many coefficients as its square."""
    server, client = Server(np.zeros(d, np.float32), 1, spec), Client(np.zeros(d, np.float32), spec)
    for _ in range(3):
        server.begin_round()
        model = client.receive(server.message_for(0))
        server.receive(0, client.update(model + np.random.default_rng(0).standard_normal(d).astype(np.float32), 1.0))
        assert server.end_round().taken == [0]


def test_what_transforms_may_need_is_no_room_for_others():
    server, clients = make(spec="dense/raw")
    server.begin_round()
    up = read_up(clients[0].update(clients[0].receive(server.message_for(0)), 1.0), D)[0]
    padded = container.pack(D, D, 0, None, 1, np.zeros(8 * D + 100, np.uint8))
    with pytest.raises(Rejected, match=f"oversized: .* {D} coefficients has at most"):
        server.receive(0, dataclasses.replace(up, container=padded).pack())


def test_no_flipped_bit_is_taken():
    server, clients = make()
    server.begin_round()
    message = clients[0].update(train(0, clients[0].receive(server.message_for(0))), 5)
    for at in range(message.size):
        wrong = message.copy()
        wrong[at] ^= 1 << at % 8
        with pytest.raises(Rejected):
            server.receive(0, wrong)
    server.receive(0, message)
    with pytest.raises(Rejected, match="late"):
        server.receive(0, message)
    with pytest.raises(Rejected, match="late"):
        server.receive(99, message)
    assert server.end_round().taken == [0]


def test_a_message_may_be_overwritten_once_it_has_been_taken():
    (server, clients), (other, others) = make(), make()
    room = np.empty(10_000, np.uint8)

    def through_the_room(number, message):
        room[: message.size] = message
        return room[: message.size]

    for _ in range(3):
        assert play(server, clients, through_the_room) == play(other, others)


def test_no_flipped_bit_reaches_a_client():
    server, clients = make()
    play(server, clients)
    server.begin_round()
    message = server.message_for(0)
    before = clients[0].state_dict()
    for at in range(message.size):
        wrong = message.copy()
        wrong[at] ^= 1 << at % 8
        with pytest.raises(ContainerError):
            clients[0].receive(wrong)
    np.testing.assert_array_equal(clients[0].state_dict()["model"], before["model"])
    clients[0].receive(message)


def test_rounds_that_a_client_cannot_follow():
    client = Client(start(), SPEC)
    blob = grace_ext.compressor(SPEC).compress(start())
    for wrong in (Down(3, 2, 0, [blob]), Down(1, 0, 0, [blob, blob]), Down(1, 0, 1, [blob]), Down(1, FRESH, 0, [])):
        with pytest.raises(ContainerError, match="round|containers"):
            client.receive(wrong.pack())
    nothing = grace_ext.compressor("dense/raw").compress(np.full(D, np.inf, np.float32))
    with pytest.raises(ContainerError, match="finite"):
        client.receive(Down(1, 0, 0, [nothing]).pack())


def test_a_client_whose_training_failed_says_so():
    client = Client(start(), SPEC)
    with pytest.raises(ConfigError, match="NaN"):
        client.update(np.full(D, np.nan), 1)


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


@pytest.mark.parametrize("memory", ["residual", "ef21", "none"])
@pytest.mark.parametrize("arrives", [True, False])
def test_a_client_saved_with_an_update_under_way_goes_on_as_if_nothing_had_happened(memory, arrives):
    server, clients = make(memory)
    for _ in range(3):
        play(server, clients, lambda number, message: message if number or arrives else None)
    again = Client(start(), SPEC, memory=memory, number=0)
    again.load_state_dict(clients[0].state_dict())
    for number in server.begin_round():
        message = server.message_for(number)
        if number == 0:
            assert again.receive(message).tobytes() == clients[0].receive(message).tobytes()
            trained = train(0, again.model.known)
            assert again.update(trained, 1).tobytes() == clients[0].update(trained, 1).tobytes()


def test_a_saved_client_that_has_missed_a_round_goes_on():
    server, clients = make()
    for _ in range(3):
        play(server, clients)
    state = clients[0].state_dict()
    play(server, clients, lambda number, message: message if number else None)
    again = Client(start(), SPEC, number=0)
    again.load_state_dict(state)
    server.join(0, again.round)
    server.begin_round()
    assert again.receive(server.message_for(0)).tobytes() == server.told.known.tobytes()
    with pytest.raises(ConfigError, match="elements"):
        Client(np.zeros(3)).load_state_dict(state)


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
    with pytest.raises(ConfigError, match="memory"):
        Client(start(), "randomk:0.1:unbiased=true")
