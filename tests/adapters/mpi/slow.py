"""One rank of test_mpi.py: slow.py FOLDER STALENESS, with three ranks. Rank 0 is the server and writes
server.json. Client 1 is slow and writes slow.json: it answers in rounds 4, 8, 12 and 16 only, so that each of its updates is
late. If late updates are taken, it loses its state after its second update.

Nothing depends on how fast this machine is: the slow client waits for a file that says that a round has ended, and the
server's clock says that a round's time is over as soon as only the slow client is waited for, and is not going to answer in
this round.
"""

import json
import sys
import time
import zlib
from pathlib import Path

import numpy as np
from mpi4py import MPI

from grace_ext.adapters import mpi
from grace_ext.federated import Client, Server

D, ROUNDS, EVERY, TIMEOUT = 300_000, 16, 4, 5.0  # a model is longer than what MPI sends without a receiver
SLOW = 1
OPTIONS = {"compression": "dense/raw", "memory": "ef21"}


class Clock:
    """Stands for `time` in the server's module."""

    sleep = staticmethod(time.sleep)

    def __init__(self):
        self.server, self.core, self.round = None, None, 0

    def monotonic(self) -> float:
        answers = self.round % EVERY == 0 and self.core.heard < self.round // EVERY
        return TIMEOUT if self.server._waiting == {SLOW} and not answers else 0.0


class HeardServer(Server):
    heard = 0  # updates of the slow client

    def receive(self, client, message):
        self.heard += client == SLOW
        super().receive(client, message)


class ForgettingClient(Client):
    """Loses its state before its third message comes."""

    messages = 0

    def receive(self, message):
        self.messages += 1
        if self.messages == 3:
            super().__init__(np.zeros(D, np.float32), number=SLOW, **OPTIONS)
        return super().receive(message)


def serve(comm, folder, staleness):
    core = HeardServer(np.zeros(D, np.float32), 2, staleness=staleness, norm_limit=float("inf"), **OPTIONS)
    mpi.time = Clock()
    server = mpi.FederatedServer(core, comm, timeout=TIMEOUT)
    mpi.time.server, mpi.time.core = server, core
    reports = []
    for mpi.time.round in range(1, ROUNDS + 1):
        reports.append(server.round())
        (folder / f"ended-{mpi.time.round}").touch()
    mpi.time = time
    silent = server.stop(timeout=3600)
    known = core.estimate(SLOW)
    estimate = np.zeros(D, np.float32) if known is None else known
    (folder / "server.json").write_text(
        json.dumps(
            {
                "taken": [report.taken for report in reports],
                "missing": [report.missing for report in reports],
                "stale": [report.stale for report in reports],
                "sent": [report.sent for report in reports],
                "silent": silent,
                "rejections": core.rejections,
                "estimate": zlib.crc32(estimate),
            }
        )
    )


def take_part(comm, folder, staleness):
    number, asked = comm.rank - 1, []
    kind = ForgettingClient if number == SLOW and staleness else Client
    client = kind(np.zeros(D, np.float32), number=number, **OPTIONS)

    def train(model, round_):
        asked.append(round_)
        ended = folder / f"ended-{min(EVERY * len(asked) - 1, ROUNDS)}"
        while number == SLOW and not ended.exists():
            time.sleep(0.01)
        return model + np.float32(number + 1), 1.0

    mpi.FederatedClient(client, comm).run(train)
    if number == SLOW:
        (folder / "slow.json").write_text(json.dumps({"asked": asked, "estimate": zlib.crc32(client.told)}))


world = MPI.COMM_WORLD
(take_part if world.rank else serve)(world, Path(sys.argv[1]), int(sys.argv[2]))
