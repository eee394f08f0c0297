"""A client: what it follows, and how it goes on from a saved state."""

import numpy as np
import pytest
from support.federated_training import SPEC, D, make, play, start, train

import grace_ext
from grace_ext import ConfigError, ContainerError
from grace_ext.federated import Client
from grace_ext.federated.messages import FRESH, Down, read_up
from grace_ext.pipeline import container
from grace_ext.value.raw import RawValue

UNBIASED = "randomk:0.1:unbiased=true"


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


@pytest.mark.parametrize("memory", ["residual", "ef21", "none"])
def test_an_update_that_cannot_be_sent_says_so(memory):
    """Of float64, of which what is too large for float32 is an Inf, or together with what is owed."""
    largest = np.finfo(np.float32).max
    client = Client(start(), "topk:0.01/raw/raw", memory=memory)
    state = client.state_dict()
    for wrong, said in (
        (np.full(D, 1e300), "NaN or an Inf"),
        (np.zeros(D + 1), "401 elements"),
        (np.zeros(D, bool), "bool"),
    ):
        with pytest.raises(ConfigError, match=said):
            client.update_by(wrong, 1)
    assert same(client.state_dict(), state)
    if memory != "none":
        client.load_state_dict(state | {"owed": np.full(D, 0.6 * largest), "if_taken": np.full(D, 0.6 * largest)})
        with pytest.raises(ConfigError, match="owed"):
            client.update_by(np.full(D, 0.6 * largest if memory == "residual" else -0.6 * largest), 1)
    exact = client.update_by(np.full(D, 0.5), 1)
    assert read_up(exact, D)[0].samples == 1


def same(state, other):
    return all(np.array_equal(state[key], other[key]) for key in state)


@pytest.mark.parametrize("memory", ["residual", "ef21"])
def test_values_that_are_scaled_up_are_not_corrected_once_more(memory):
    with pytest.raises(ConfigError, match=f"memory '{memory}' would correct"):
        Client(start(), UNBIASED, memory=memory)
    client = Client(start(), SPEC, memory=memory)
    with pytest.raises(ConfigError, match=f"memory '{memory}' would correct"):
        client.update(start(), 1, UNBIASED)
    assert Client(start(), UNBIASED, memory="none").update(start(), 1, UNBIASED).size


def test_a_low_rank_spec_is_refused_at_once():
    with pytest.raises(ConfigError, match="no container"):
        Client(start(), "powersgd:4")
    with pytest.raises(ConfigError, match="no container"):
        Client(start(), SPEC).update(start(), 1, "powersgd:4")


@pytest.mark.parametrize("spoilt", [np.nan, np.inf, 2e38])
def test_a_model_that_is_not_finite_is_not_taken(spoilt):
    """A NaN or an Inf among the values, which no encoder writes, or values whose sum with the model overflows."""
    client = Client(np.full(D, 2e38), SPEC)
    before = client.state_dict()
    values = np.full(D, spoilt, np.float32)
    blob = container.pack(D, D, 0, np.empty(0, np.uint8), RawValue.id, values.view(np.uint8))
    with pytest.raises(ContainerError, match="not finite"):
        client.receive(Down(1, 0, 0, [blob]).pack())
    assert same(client.state_dict(), before)


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
