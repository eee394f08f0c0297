"""Messages between server and clients: versions, sizes, and every flipped bit."""

import dataclasses

import numpy as np
import pytest
from support.federated_training import D, make, play, start, train, up_header

from grace_ext import ContainerError
from grace_ext.federated import Client, Rejected, Server
from grace_ext.federated.messages import Down, read_up
from grace_ext.pipeline import container


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
