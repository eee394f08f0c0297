"""A federated job in which a rank fails: failing.py WHERE, by an exception on the server between rounds or in a
client's training, or by an end without a word: the server's before stop(), a client's by sys.exit(); or a client or the
server is stopped by a signal, for good."""

import os
import signal
import sys

import numpy as np
from mpi4py import MPI

from grace_ext.adapters._common import mpi_exit
from grace_ext.adapters.mpi import FederatedClient, FederatedServer
from grace_ext.federated import Client, Server

where, comm, start = sys.argv[1], MPI.COMM_WORLD, np.zeros(1000, np.float32)


def train(model, round_):
    if comm.rank == 1 and round_ == 3:
        if where == "train":
            raise RuntimeError("rank 1 gives up")
        if where == "exit":
            sys.exit(3)
        if where == "stopped":
            os.kill(os.getpid(), signal.SIGSTOP)
    return model - 1, 1


if comm.rank:
    FederatedClient(
        Client(start, "dense/fp16", number=comm.rank - 1), comm, timeout=2 if where == "stopped server" else None
    ).run(train)
else:
    mpi_exit.PATIENCE = 2
    server = FederatedServer(Server(start, comm.size - 1, "dense/fp16"), comm, timeout=3600)
    for number in range(5):
        if number == 2 and where == "stopped":
            server._timeout = 2  # not before: rank 1 has to have answered to be asked in round 3, when it stops
        server.round()
        if number == 3 and where == "server":
            raise RuntimeError("rank 0 gives up")
        if number == 3 and where == "stopped server":
            os.kill(os.getpid(), signal.SIGSTOP)
    if where != "stop":
        server.stop(timeout=2 if where == "stopped" else 3600)
        print("all rounds were played")
