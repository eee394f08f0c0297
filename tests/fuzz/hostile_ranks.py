"""Hostile clients of the MPI adapter's server, without MPI: messages, ranks and time are made here."""

import collections
import contextlib
import importlib.util
import logging
import struct
import sys
import tempfile
import types
from unittest import mock

import fuzzing
import numpy as np
from fuzzing import chance, pick
from support.arrays import gauss

from grace_ext import ContainerError
from grace_ext.federated import Client, ClippedMean, Server, WeightedMean  # noqa: F401

ROUNDS, HONEST, CLIENTS = 5, 4, 6  # the last clients are the hostile ones
SPEC, SIZE = "topk:0.5/rice/qsgd", 12
MODEL, UPDATE, HELLO, LEAVE, STOP, BYE, BUDGET, TOOK = range(1, 9)  # tags, as in adapters/mpi.py
MEANS = ("WeightedMean()", "ClippedMean()")

IMPORTS = """import collections, importlib.util, logging, sys, tempfile, types
from unittest import mock
import numpy as np
from grace_ext import ContainerError
from grace_ext.federated import ClippedMean, Server, WeightedMean
"""


class Clock:
    """Stands for `time` in the adapter: a look at it takes a millisecond."""

    now = 0.0

    def monotonic(self):
        self.now += 1e-3
        return self.now

    def sleep(self, seconds):
        self.now += 0.05


class Status:
    def Get_tag(self):
        return self.tag

    def Get_count(self, datatype):
        return self.size


class Ranks:
    """The communicator of the server's rank. answers(client, tag, data) -> (tag, bytes) of each message that a client sends
    for what it got."""

    def __init__(self, clients, answers):
        self.rank, self.size, self.answers = 0, clients + 1, answers
        self.inbox = [collections.deque() for _ in range(clients)]

    def Improbe(self, source, tag, status):
        box = self.inbox[source - 1]
        if not box:
            return None
        status.tag, data = box.popleft()
        status.size = len(data)

        def receive(buffer):
            buffer[0][:] = np.frombuffer(data, np.uint8)
            return types.SimpleNamespace(Test=lambda: True)

        return types.SimpleNamespace(Irecv=receive)

    def Isend(self, buffer, rank, tag):
        self.inbox[rank - 1].extend(self.answers(rank - 1, tag, buffer[0].tobytes()))
        return types.SimpleNamespace(Test=lambda: True)


def adapter():
    """grace_ext.adapters.mpi with this clock and no mpi4py; the one that others import stays as it is."""
    found = importlib.util.find_spec("grace_ext.adapters.mpi")
    module = importlib.util.module_from_spec(found)
    mpi = types.SimpleNamespace(Status=Status, BYTE=None, ANY_TAG=-1, Comm=object, COMM_WORLD=None, Request=object)
    exits = types.SimpleNamespace(begin=lambda *_: None, end=lambda *_: None)
    modules = {"mpi4py": types.SimpleNamespace(MPI=mpi), "grace_ext.adapters._common.mpi_exit": exits}
    with mock.patch.dict(sys.modules, modules):
        found.loader.exec_module(module)
    module.time = Clock()
    module._LOG = logging.Logger("hostile clients", logging.CRITICAL + 1)  # says nothing
    return module


def restarted(module, server, core, pace):
    """The server after it has ended and begun again with what it saved."""
    with tempfile.TemporaryDirectory() as folder:
        server.server.save(f"{folder}/state")
        core.load(f"{folder}/state")
    return module.FederatedServer(core, server._comm, timeout=1.0, pace=pace)


def check(server, report, honest):
    """Who is honest was heard, the model is finite, and nothing piles up."""
    assert np.isfinite(server.server.model).all()
    assert not set(range(honest)) & set(report.missing), report
    assert all(client in report.taken or report.rejected[client].startswith("norm") for client in range(honest)), report
    assert all(len(sent) <= 3 for sent in server._sent.values()) and len(server._computed) <= server.server.clients


def numbers(rng: np.random.Generator) -> bytes:
    """What goes with the other tags."""
    return pick(
        rng,
        (
            b"",
            struct.pack("<q", pick(rng, (-1, 0, 1, 3, 2**62))),
            rng.bytes(int(rng.integers(17))),
            struct.pack("<d", pick(rng, (0.0, 1e-9, 0.5, 1e300, float("nan"), float("inf"), -1.0))),
        ),
    )


def game(rng: np.random.Generator, counts: collections.Counter, forged) -> None:
    """Some rounds. forged(rng, server, honest, asked, before): as hostile_clients.forged. Raises Found."""
    start, module = np.zeros(SIZE, np.float32), adapter()
    memory, pace, mean = pick(rng, ("residual", "ef21", "none")), pick(rng, (None, 0.5)), pick(rng, MEANS)
    made = f"Server(np.zeros({SIZE}, np.float32), {CLIENTS}, {SPEC!r}, mean={mean}, memory={memory!r})"
    clients = [Client(start, SPEC, memory=memory, number=number) for number in range(CLIENTS)]
    usual, before, answered = gauss(SIZE, 8), [], []

    def hostile(client, honest, asked):
        sent = []
        for _ in range(pick(rng, (1, 2, 5, 30))):
            tag = UPDATE if chance(rng, 0.6) else pick(rng, (*range(10), HELLO, LEAVE, TOOK))
            message = forged(rng, server.server, honest, asked, before) if chance(rng, 0.7) else None
            if not (isinstance(message, np.ndarray) and message.dtype == np.uint8 and message.ndim == 1):
                message = np.frombuffer(numbers(rng), np.uint8)
            counts["read over MPI"] += 1
            sent.append((tag, message.tobytes()))
        return sent

    def answers(client, tag, data):
        said = []
        if tag == MODEL:
            asked = np.frombuffer(data, np.uint8)
            with contextlib.suppress(ContainerError if client >= HONEST else ()):  # what it has said may not be so
                clients[client].receive(asked)
            update = clients[client].update_by(usual * np.float32(1 + 0.2 * rng.random()), 5.0)
            before.append(update)
            said = [(TOOK, struct.pack("<d", 1e-4)), (UPDATE, update.tobytes())]
            if client >= HONEST:
                said = hostile(client, update, asked) + (said if chance(rng, 0.2) else [])
        elif tag == STOP and client < HONEST:
            said = [(BYE, b"")]
        answered.append(said)
        return said

    comm = Ranks(CLIENTS, answers)
    lines = [f"server = module.FederatedServer({made}, comm, timeout=1.0, pace={pace})"]
    server = module.FederatedServer(eval(made), comm, timeout=1.0, pace=pace)
    try:
        for _ in range(ROUNDS):
            lines.append(f"check(server, server.round(), {HONEST})")
            check(server, server.round(), HONEST)
            if chance(rng, 0.2):
                lines.append(f"server = restarted(module, server, {made}, {pace})")
                server = restarted(module, server, eval(made), pace)
            for client in range(HONEST, CLIENTS) if chance(rng, 0.5) and before else ():
                said = hostile(client, before[-1], before[-1])
                lines.append(f"comm.inbox[{client}].extend({said})")
                comm.inbox[client].extend(said)
        lines.append(f"assert not set(server.stop()) & set(range({HONEST}))")
        assert not set(server.stop()) & set(range(HONEST))
    except Exception as error:
        first = ["module = adapter()", f"answered = iter({answered})", f"comm = Ranks({CLIENTS}, lambda *_: next(answered))"]
        text = fuzzing.script(error, IMPORTS, (Clock, Status, Ranks, adapter, restarted, check), *first, *lines)
        raise fuzzing.Found(text) from error
