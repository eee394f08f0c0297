"""Rounds of a federated server and its clients in one process."""

import statistics
from collections.abc import Callable

import _lib  # noqa: F401  (puts the examples' folder on the path)
import torch
from federated_training import LocalTraining, evaluate, set_vector

from grace_ext.federated import Client, Server


def train(
    server: Server,
    clients: list[tuple[Client, LocalTraining]],
    rounds: int,
    is_evaluated: Callable[[int], bool],
    net: torch.nn.Module,
    test: tuple[torch.Tensor, torch.Tensor],
) -> tuple[list[float], float, float]:
    """Train; return accuracies in percent, and the mean bytes of a message up and down as shares of float32.

    is_evaluated: whether the server's model is evaluated after a round. Messages down count from the second round on: in the first
    there is nothing to tell.
    """
    sent, told, accuracies = [], [], []
    for round_ in range(1, rounds + 1):
        for number in server.begin_round():
            client, work = clients[number]
            message = server.message_for(number)
            update = client.update(*work(client.receive(message), round_))
            server.receive(number, update)
            sent.append(update.size)
            if round_ > 1:
                told.append(message.size)
        server.end_round()
        if is_evaluated(round_):
            set_vector(net, server.model)
            accuracies.append(100 * evaluate(net, *test))
    whole = 4 * server.model.size
    return accuracies, statistics.mean(sent) / whole, statistics.mean(told) / whole
