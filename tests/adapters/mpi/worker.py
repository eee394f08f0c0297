"""One rank of test_mpi.py: worker.py FOLDER. Rank 0 is the server and writes server.json."""

import json
import sys
import time
from pathlib import Path

import numpy as np
from support.federated_rounds import HOSTILE, LATE, LATE_IN, LEAVING, OVER, ROUNDS, SPEC, TIMEOUT, D

import grace_ext
from grace_ext.federated import Client, Server
from grace_ext.federated.messages import Up, largest


def start():
    return np.random.default_rng(7).standard_normal(D).astype(np.float32)


def target(client):
    return np.random.default_rng(client).standard_normal(D).astype(np.float32)


class Clock:
    """Stands for `time` in the server's module: a round's time is over once only the late client is waited for, in the round
    in which it is late, and never before. So nothing depends on how fast this machine is."""

    sleep = staticmethod(time.sleep)

    def __init__(self):
        self.server, self.round = None, 0

    def monotonic(self) -> float:
        over = self.round == LATE_IN and self.server._waiting == {LATE}
        return TIMEOUT if over else 0.0


def serve(comm, folder):
    from grace_ext.adapters import mpi

    core, mpi.time = Server(start(), comm.size - 1, SPEC, weights="samples", most_samples=10.0), Clock()
    server = mpi.time.server = mpi.FederatedServer(core, comm, timeout=TIMEOUT)
    reports = []
    for mpi.time.round in range(1, ROUNDS + 1):
        reports.append(server.round())
        if mpi.time.round == LATE_IN:
            (folder / OVER).touch()
    silent = server.stop()
    (folder / "server.json").write_text(
        json.dumps(
            {
                "taken": [report.taken for report in reports],
                "missing": [report.missing for report in reports],
                "stale": [report.stale for report in reports],
                "rejected": [report.rejected for report in reports],
                "silent": silent,
                "rejections": core.rejections,
                "sent": [report.sent for report in reports],
                "received": [report.received for report in reports],
                "distance": float(np.linalg.norm(core.model - np.mean([target(3), target(0)], axis=0))),
            }
        )
    )


def forged(round_):
    """What the hostile client sends in the place of its update, by round."""
    return {
        3: lambda: np.zeros(largest(D) * 3, np.uint8),
        4: lambda: np.random.default_rng(0).integers(0, 256, 500).astype(np.uint8),
        5: lambda: Up(round_, 1.0, grace_ext.compressor(SPEC).compress(np.full(D, np.nan, np.float32))).pack(),
        6: lambda: Up(round_, 1.0, grace_ext.compressor(SPEC).compress(np.full(D, 1e8, np.float32))).pack(),
    }.get(round_)


class Hostile(Client):
    def update(self, trained, samples, compression=None):
        honest = super().update(trained, samples, compression)
        make = forged(self.round)
        return make() if make else honest


def take_part(comm, folder):
    from grace_ext.adapters.mpi import FederatedClient

    number = comm.rank - 1

    def train(model, round_):
        while number == LATE and round_ == LATE_IN and not (folder / OVER).exists():
            time.sleep(0.01)
        if number == LEAVING and round_ == 12:
            return None
        weight = 1e-6 if number in (LEAVING, HOSTILE) else 10.0
        return model - np.float32(0.04) * (model - target(number)), weight

    kind = Hostile if number == HOSTILE else Client
    FederatedClient(kind(start(), SPEC, number=number), comm).run(train)


if __name__ == "__main__":  # the test imports this file, too, and is no rank
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    (take_part if world.rank else serve)(world, Path(sys.argv[1]))
