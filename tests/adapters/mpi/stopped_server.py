"""Two ranks of test_mpi.py: stopped_server.py FOLDER WHERE. A signal stops the server for good while a message is on its way: its own
to the client ("model"), or the client's to it ("update").
"""

import os
import signal
import sys
import time
from pathlib import Path

import numpy as np
from mpi4py import MPI

from grace_ext.adapters import mpi
from grace_ext.federated import Client, Server

D = 300_000  # a model is longer than what MPI sends without a receiver
folder, where, comm = Path(sys.argv[1]), sys.argv[2], MPI.COMM_WORLD
training, server = folder / "training", folder / "server"


def train(model, round_):
    training.touch()
    status = Path("/proc", server.read_text(), "stat")
    while status.read_text().rpartition(")")[2].split()[0] != "T":
        time.sleep(0.01)
    return model, 1


class StoppedServer(mpi.FederatedServer):
    def _receive(self):
        if training.exists():
            os.kill(os.getpid(), signal.SIGSTOP)
        return super()._receive()


if comm.rank == 0:
    server.write_text(str(os.getpid()))
comm.Barrier()
if comm.rank:
    mpi.FederatedClient(Client(np.zeros(D, np.float32), "dense/raw"), comm, timeout=2).run(train)
elif where == "model":
    request = comm.Isend([np.zeros(4 * D, np.uint8), MPI.BYTE], 1, mpi._MODEL)
    os.kill(os.getpid(), signal.SIGSTOP)
else:
    StoppedServer(Server(np.zeros(D, np.float32), 1, "dense/raw"), comm, timeout=3600).round()
