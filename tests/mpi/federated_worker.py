"""One rank of test_federated_mpi.py: federated_worker.py FOLDER. Rank 0 is the server and writes server.json."""

import json
import sys
import time
from pathlib import Path

import numpy as np

import grace_ext
from grace_ext.federated import Client, Server
from grace_ext.federated.messages import Up, largest

D, SPEC = 2000, "topk:0.1/rice/qsgd:8"
ROUNDS, TIMEOUT = 100, 5.0
LATE, LEAVING, HOSTILE = 0, 1, 2  # clients


def start():
    return np.random.default_rng(7).standard_normal(D).astype(np.float32)


def target(client):
    return np.random.default_rng(client).standard_normal(D).astype(np.float32)


def warm_up():
    """A round within this process, so that no round of the test waits for kernels."""
    server, client = Server(start(), 1, SPEC), Client(start(), SPEC)
    server.begin_round()
    server.receive(0, client.update(client.receive(server.message_for(0)) + 1, 1.0))
    server.end_round()


def serve(comm, folder):
    from grace_ext.adapters.mpi import FederatedServer

    core = Server(start(), comm.size - 1, SPEC)
    warm_up()
    comm.Barrier()  # all have loaded and compiled
    server = FederatedServer(core, comm, timeout=TIMEOUT)
    reports, seconds = [], []
    for _ in range(ROUNDS):
        began = time.monotonic()
        reports.append(server.round())
        seconds.append(time.monotonic() - began)
    silent = server.stop()
    (folder / "server.json").write_text(json.dumps({
        "taken": [report.taken for report in reports], "missing": [report.missing for report in reports],
        "rejected": [report.rejected for report in reports], "seconds": seconds, "silent": silent,
        "rejections": core.rejections, "sent": [report.sent for report in reports],
        "received": [report.received for report in reports],
        "distance": float(np.linalg.norm(core.model - np.mean([target(3), target(0)], axis=0)))}))


def forged(round_):
    """What the hostile client sends in the place of its update, by round."""
    return {
        3: lambda: np.zeros(largest(D) * 50, np.uint8),
        4: lambda: np.random.default_rng(0).integers(0, 256, 500).astype(np.uint8),
        5: lambda: Up(round_, 1.0, grace_ext.compressor(SPEC).compress(np.full(D, np.nan, np.float32))).pack(),
        6: lambda: Up(round_, 1.0, grace_ext.compressor(SPEC).compress(np.full(D, 1e8, np.float32))).pack(),
    }.get(round_)


class Hostile(Client):
    def update(self, trained, samples, compression=None):
        honest = super().update(trained, samples, compression)
        make = forged(self.round)
        return make() if make else honest


def take_part(comm):
    from grace_ext.adapters.mpi import FederatedClient

    number = comm.rank - 1

    def train(model, round_):
        if number == LATE and round_ == 8:
            time.sleep(1.5 * TIMEOUT)
        if number == LEAVING and round_ == 12:
            return None
        weight = 1e-6 if number in (LEAVING, HOSTILE) else 10.0
        return model - np.float32(0.04) * (model - target(number)), weight

    kind = Hostile if number == HOSTILE else Client
    warm_up()
    comm.Barrier()
    FederatedClient(kind(start(), SPEC, number=number), comm).run(train)


if __name__ == "__main__":  # the test imports this file, too, and is no rank
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    serve(world, Path(sys.argv[1])) if world.rank == 0 else take_part(world)
