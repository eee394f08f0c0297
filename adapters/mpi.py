"""Federated training over MPI: rank 0 is the server, every other rank a client.

    from grace_ext.adapters.mpi import FederatedClient, FederatedServer

    if comm.rank == 0:
        server = FederatedServer(Server(start, clients=comm.size - 1), comm, timeout=60)
        for _ in range(rounds):
            report = server.round()
        server.stop()
    else:
        FederatedClient(Client(start, number=comm.rank - 1), comm).run(train)

A rank that ends by an exception that nobody caught, or before its part is over, ends all ranks.
"""

import dataclasses
import logging
import math
import struct
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from mpi4py import MPI

from grace_ext import ConfigError, ContainerError
from grace_ext.federated import Client, Fitted, Pace, Rejected, Report, Server
from grace_ext.federated.messages import largest
from grace_ext.pipeline.compressor import Compressor

from ._common import mpi_exit

_LOG = logging.getLogger("grace_ext")
_MODEL, _UPDATE, _HELLO, _LEAVE, _STOP, _BYE, _BUDGET, _TOOK = range(1, 9)  # tags
_ROUND, _NUMBER = struct.Struct("<q"), struct.Struct("<d")
_NAP = 0.0005  # seconds
_MOST = 8  # messages of a client between rounds: what it computed, its update, that it leaves, is there again, and some more


@dataclasses.dataclass
class _Arriving:
    """A message that is on its way to the server."""

    request: MPI.Request
    tag: int
    data: np.ndarray


class FederatedServer:
    """Runs rounds of a grace_ext.federated.Server. Client number i is the rank i + 1.

    A client that is late is left out of the round. Its update counts in the round in which it comes, if the server's
    `staleness` allows that. Only then is the client asked again, and gets the newest model, so that at most one model is on
    its way to each client. Updates of all clients arrive at the same time, at most one message of each.

    Args:
        server: The server whose rounds are run.
        comm: The ranks of the server, which is rank 0, and of its clients.
        timeout: The seconds that a round waits for updates.
        pace: The seconds that a round is to take. The densities of both directions then follow what the links give: that of
            each client's updates its own link (Kimad), that of the model, which all clients get alike, the slowest link of
            those that have time left. None: densities stay as they are.

    Raises:
        ConfigError: The ranks are not the server and its clients, an argument is out of range, or a pace is given and the
            compression has no density.
    """

    def __init__(self, server: Server, comm: MPI.Comm = MPI.COMM_WORLD, *, timeout: float = 60.0, pace: float | None = None):
        if comm.size != server.clients + 1:
            raise ConfigError(f"{comm.size} ranks; a server of {server.clients} clients needs {server.clients + 1}")
        if comm.rank != 0:
            raise ConfigError(f"rank {comm.rank} is a client; rank 0 is the server")
        if not timeout > 0:
            raise ConfigError(f"timeout={timeout}; allowed: seconds, above 0")
        self.server, self._comm, self._timeout = server, comm, timeout
        self._longest = largest(server.model.size)  # bytes of a message
        self._arriving: dict[int, _Arriving] = {}  # a message of each client that is on its way
        self._sent: dict[int, list[tuple[MPI.Request, np.ndarray]]] = {client: [] for client in range(server.clients)}
        self._waiting: set[int] = set()  # clients of the round that nothing has come from yet
        self._unasked: set[int] = set()  # those of them that have not got this round's model
        self._busy: set[int] = set()  # clients that have got a model and have not answered
        self._silent: set[int] = set()  # clients that have not yet heard of the end
        #: By client, with a pace: what is known of its link and of how long it computes.
        self.paces = {client: Pace(pace) for client in range(server.clients)} if pace is not None else {}
        self._down = Fitted(server.compressor, server.model.size) if self.paces else None
        server.own_densities |= bool(self.paces)
        self._asked: dict[int, tuple[float, int]] = {}  # when, and in how many bytes
        self._computed: dict[int, float] = {}  # seconds, as clients say
        mpi_exit.begin(self, "before FederatedServer.stop()")

    def round(self, compression: str | dict | Compressor | None = None) -> Report:
        """Run one round, with the clients that answer in time.

        Args:
            compression: The compression of the model in this round, whatever the pace says; None for the usual one.

        Returns:
            The server's report of the round.
        """
        self._drain()
        if self._down and compression is None:
            chosen = self.server.begin_round(self._down.at(self._budget_down()))
            self._down.sent(self.server.told_bytes)
        else:
            chosen = self.server.begin_round(compression)
        self._waiting, self._unasked = set(chosen), set(chosen)
        self._ask()
        self._receive_until(lambda: not self._waiting, self._timeout)
        for client in self._waiting - self._unasked if self.paces else ():
            at, sent = self._asked[client]
            self.paces[client].missed(sent, time.monotonic() - at)
        self._waiting, self._unasked = set(), set()
        return self.server.end_round()

    def _ask(self) -> None:
        """Send this round's model to those of its clients that have answered the one before."""
        for client in sorted(self._unasked - self._busy):
            if self._under_way(client):
                continue
            message = self.server.message_for(client)
            if self.paces:
                budget = self.paces[client].budget
                self._send(client, _bytes(_NUMBER.pack(math.nan if budget is None else budget)), _BUDGET)
            self._asked[client] = time.monotonic(), message.size
            self._send(client, message, _MODEL)
            self._busy.add(client)
            self._unasked.discard(client)

    def stop(self, timeout: float = 10.0) -> list[int]:
        """Tell all clients that training is over.

        Args:
            timeout: The seconds to wait for their answers.

        Returns:
            The numbers of the clients that did not answer in time. If they do not end either, the job is ended without them,
            half a minute after this process.
        """
        self._silent = set(self.server.present)
        for client in self._silent:
            self._send(client, np.empty(0, np.uint8), _STOP)
        self._receive_until(lambda: not self._silent, timeout)
        mpi_exit.end(self, {client + 1 for client in self._silent})
        return sorted(self._silent)

    def _send(self, client: int, message: np.ndarray, tag: int) -> None:
        self._sent[client].append((self._comm.Isend([message, MPI.BYTE], client + 1, tag), message))

    def _under_way(self, client: int) -> bool:
        """Whether messages to this client are still on their way. Those that have arrived are released."""
        self._sent[client] = [(request, kept) for request, kept in self._sent[client] if not request.Test()]
        return bool(self._sent[client])

    def _receive_until(self, done: Callable, timeout: float) -> None:
        deadline = time.monotonic() + timeout
        while not done() and time.monotonic() < deadline:
            if not self._receive():
                time.sleep(_NAP)
            self._ask()

    def _drain(self) -> None:
        """Receive what came between rounds, but not without end from clients that never stop sending."""
        for _ in range(_MOST):
            if not self._receive():
                break

    def _receive(self) -> bool:
        """Take one message of each client from which one has arrived, so that none keeps others from being heard. Returns
        False if there was none."""
        return any([self._receive_from(client) for client in range(self.server.clients)])

    def _receive_from(self, client: int) -> bool:
        """Take a message of this client if it has arrived; returns whether one has.

        Messages of all clients are on their way at the same time: a link that is slow, or that fails in the middle of a message,
        keeps only its own client from being heard.
        """
        if client not in self._arriving:
            status = MPI.Status()
            message = self._comm.Improbe(client + 1, MPI.ANY_TAG, status)
            if message is None:
                return False
            # What is too long has to go somewhere: Open MPI 5.0.11 crashes where it cuts a message off.
            data = np.empty(status.Get_count(MPI.BYTE), np.uint8)
            self._arriving[client] = _Arriving(message.Irecv([data, MPI.BYTE]), status.Get_tag(), data)
        arriving = self._arriving[client]
        if not arriving.request.Test():
            return False
        del self._arriving[client]
        size = arriving.data.size
        self._take(client, arriving.tag, arriving.data if size <= self._longest else None, size)
        return True

    def _take(self, client: int, tag: int, data: np.ndarray | None, size: int) -> None:
        """Process a message. data: None if it was longer than any message may be."""
        if tag != _TOOK:
            self._busy.discard(client)
        if tag == _LEAVE:
            self.server.leave(client)
            self._done(client)
        elif tag == _HELLO:
            known = _ROUND.unpack(data.tobytes())[0] if data is not None and size == _ROUND.size else -1
            self.server.join(client, known if known >= 0 else None)
            self._done(client)
        elif tag == _BYE:
            self._silent.discard(client)
        elif tag == _TOOK:
            if data is not None and size == _NUMBER.size:
                self._computed[client] = _NUMBER.unpack(data.tobytes())[0]
        else:
            try:
                if data is None:
                    self.server.refuse(client, "oversized", f"{size} bytes; at most {self._longest} are taken")
                self.server.receive(client, data)
                self._done(client)
                self._keep_pace(client, size)
            except Rejected as error:
                _LOG.warning("federated: client %d: %s", client, error)
                if error.reason != "late":  # then this round's is still to come
                    self._done(client)

    def _done(self, client: int) -> None:
        """This round neither waits for this client nor asks it any more."""
        self._waiting.discard(client)
        self._unasked.discard(client)

    def _budget_down(self) -> float | None:
        """The bytes that the model may have: 0 if nobody has time left, None before anything is known."""
        known = [budget for client in self.server.present if (budget := self.paces[client].budget) is not None]
        return min(filter(None, known), default=0.0 if known else None)

    def _keep_pace(self, client: int, received: int) -> None:
        """Note how long this client took, when its update has come."""
        computed = self._computed.pop(client, None)
        if self.paces and computed is not None and client in self._asked:  # not if that was a server before this one
            at, sent = self._asked[client]
            self.paces[client].add(sent + received, time.monotonic() - at, computed)


class FederatedClient:
    """Answers the server of rank 0 until it stops, or this client leaves.

    Args:
        client: The client that trains and compresses.
        comm: The ranks of the server and its clients.
        timeout: The seconds that the server may be silent, and that a message may take from either to the other. None for no
            limit: a client that is not sampled is not asked for many rounds, and a server may do anything between rounds.

    Raises:
        ConfigError: This is rank 0, or the timeout is not positive.
    """

    def __init__(self, client: Client, comm: MPI.Comm = MPI.COMM_WORLD, *, timeout: float | None = None):
        if comm.rank == 0:
            raise ConfigError("rank 0 is the server, not a client")
        if timeout is not None and not timeout > 0:
            raise ConfigError(f"timeout={timeout}; allowed: seconds, above 0, or None")
        self.client, self._comm, self._timeout = client, comm, math.inf if timeout is None else timeout
        self._under_way: tuple[MPI.Request, np.ndarray] | None = None

    def run(self, train: Callable[[np.ndarray, int], tuple[np.ndarray, float] | None]) -> None:
        """Train whenever the server asks for it, until it stops.

        Args:
            train: train(model, round) gives (the model after local training, its number of samples), or None to leave. Models
                are float32[d].

        Raises:
            TimeoutError: The server has been silent for `timeout` seconds, or a message has taken longer.
        """
        mpi_exit.begin(self, "within FederatedClient.run()")
        fitted = budget = None
        while True:
            tag, message = self._next()
            if tag == _BUDGET:
                fitted = fitted or Fitted(self.client.compressor, self.client.size)
                budget = _NUMBER.unpack(message.tobytes())[0]
                continue
            started = time.perf_counter()
            if tag == _STOP:
                self._say(np.empty(0, np.uint8), _BYE)
                mpi_exit.end(self)
                return
            try:
                model = self.client.receive(message)
            except ContainerError as error:
                _LOG.warning("federated: %s: asking for the whole model", error)
                self._say(_bytes(_ROUND.pack(-1)), _HELLO)
                continue
            result = train(model, self.client.round)
            if result is None:
                self.leave()
                return
            if fitted is None:
                self._say(self.client.update(*result), _UPDATE)
                continue
            update = self.client.update(*result, fitted.at(None if math.isnan(budget) else budget))
            fitted.sent(update.size)
            self._say(_bytes(_NUMBER.pack(time.perf_counter() - started)), _TOOK)
            self._say(update, _UPDATE)

    def leave(self) -> None:
        """Take part no more."""
        self._say(np.empty(0, np.uint8), _LEAVE)
        mpi_exit.end(self)

    def join(self) -> None:
        """Take part again after `leave`, with the model as it was then."""
        self._say(_bytes(_ROUND.pack(self.client.round)), _HELLO)

    def _next(self) -> tuple[int, np.ndarray]:
        """Wait for what the server sends next: its tag and its data."""
        status = MPI.Status()
        message = self._wait_for(lambda: self._comm.Improbe(0, MPI.ANY_TAG, status))
        data = np.empty(status.Get_count(MPI.BYTE), np.uint8)
        self._finish(message.Irecv([data, MPI.BYTE]), data)
        return status.Get_tag(), data

    def _say(self, data: np.ndarray, tag: int) -> None:
        self._finish(self._comm.Isend([data, MPI.BYTE], 0, tag), data)

    def _finish(self, request: MPI.Request, data: np.ndarray) -> None:
        self._under_way = request, data  # MPI may read or write the data also after an error here
        self._wait_for(request.Test)
        self._under_way = None

    def _wait_for(self, ask: Callable) -> Any:
        """Ask again and again, and return the first answer that is true."""
        deadline = time.monotonic() + self._timeout
        while not (answer := ask()):
            if time.monotonic() > deadline:
                raise TimeoutError(f"the server, rank 0, has said nothing for {self._timeout:g} s to rank {self._comm.rank}")
            time.sleep(_NAP)
        return answer


def _bytes(data: bytes) -> np.ndarray:
    return np.frombuffer(data, np.uint8)
