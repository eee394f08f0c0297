"""Run by test_mpi.py: a server to which one client never stops to say that it is there; with MPI's messages made
here. The other client has to be heard, and rounds have to end."""

import types

import numpy as np
from mpi4py import MPI

from grace_ext.adapters.mpi import _BYE, _HELLO, _MODEL, _ROUND, _UPDATE, FederatedServer
from grace_ext.federated import Client, Server

D, MANY = 100, 100_000
ENDLESS, OTHER = 1, 2  # ranks


class Endless:
    """An MPI communicator of three ranks, as the server sees it. Each probe that may find a message of the endless client
    finds one."""

    rank, size, probes = 0, 3, 0

    def __init__(self):
        self.client, self.answers = Client(np.zeros(D, np.float32), "dense/raw"), []

    def Improbe(self, source, tag, status):
        self.probes += 1
        if self.probes > MANY:
            raise SystemExit("the server never comes to an end")
        if source == OTHER and not self.answers:
            return None
        tag, data = self.answers.pop(0) if source == OTHER else (_HELLO, _ROUND.pack(0))
        status.Set_source(source)
        status.Set_tag(tag)
        status.Set_elements(MPI.BYTE, len(data))

        def receive(buffer):
            buffer[0][:] = np.frombuffer(data, np.uint8)
            return MPI.REQUEST_NULL

        return types.SimpleNamespace(Irecv=receive)

    def Isend(self, buffer, rank, tag):
        if rank == OTHER and tag == _MODEL:
            model = self.client.receive(buffer[0])
            self.answers.append((_UPDATE, self.client.update(model + 1, 1.0).tobytes()))
        elif rank == OTHER:
            self.answers.append((_BYE, b""))
        return MPI.REQUEST_NULL


server = FederatedServer(Server(np.zeros(D, np.float32), 2, "dense/raw"), Endless(), timeout=3600)
for _ in range(3):
    assert server.round().taken == [OTHER - 1]
assert server.stop(timeout=1e-3) in ([], [ENDLESS - 1], [ENDLESS - 1, OTHER - 1])
print("all rounds have ended")
