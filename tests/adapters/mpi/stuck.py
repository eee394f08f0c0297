"""One rank of test_mpi.py: stuck.py FOLDER, with three ranks. Rank 0 is the server and writes server.json.

In the first round the update of client 1 stops in the middle: the client calls MPI no more until that round has ended, or, so that
a server that waits for it does not wait forever, for five minutes.
"""

import json
import sys
import time
from pathlib import Path

import numpy as np
from mpi4py import MPI

from grace_ext.adapters import mpi
from grace_ext.federated import Client, Server

D, ROUNDS, TIMEOUT, STUCK = 300_000, 3, 5.0, 1  # a model is longer than what MPI sends without a receiver
OPTIONS = {"compression": "dense/raw", "memory": "none"}


class Clock:
    """Stands for `time` in the server's module: the time of the first round is over when only the message that has stopped is waited
    for."""

    sleep = staticmethod(time.sleep)
    server = None
    round = 0

    def monotonic(self) -> float:
        over = self.round == 1 and self.server._waiting == {STUCK} and STUCK in self.server._arriving
        return TIMEOUT if over else 0.0


class Stuck(mpi.FederatedClient):
    def __init__(self, *args, folder):
        super().__init__(*args)
        self._ended = folder / "ended"

    def _say(self, data, tag):
        request = self._comm.Isend([data, MPI.BYTE], 0, tag)
        last = time.monotonic() + 300
        while not self._ended.exists() and time.monotonic() < last:
            time.sleep(0.01)
        while not request.Test():
            time.sleep(0.001)


def serve(comm, folder):
    mpi.time = Clock()
    server = mpi.time.server = mpi.FederatedServer(Server(np.zeros(D, np.float32), 2, **OPTIONS), comm, timeout=TIMEOUT)
    reports = []
    for mpi.time.round in range(1, ROUNDS + 1):
        reports.append(server.round())
        (folder / "ended").touch()
    mpi.time = time
    silent = server.stop(timeout=3600)
    found = {
        "taken": [report.taken for report in reports],
        "missing": [report.missing for report in reports],
        "stale": [report.stale for report in reports],
        "silent": silent,
    }
    (folder / "server.json").write_text(json.dumps(found))


def take_part(comm, folder):
    number = comm.rank - 1
    client = Client(np.zeros(D, np.float32), number=number, **OPTIONS)
    made = Stuck(client, comm, folder=folder) if number == STUCK else mpi.FederatedClient(client, comm)
    made.run(lambda model, round_: (model + np.float32(1), 1.0))


world = MPI.COMM_WORLD
(take_part if world.rank else serve)(world, Path(sys.argv[1]))
