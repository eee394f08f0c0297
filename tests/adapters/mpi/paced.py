"""One rank of test_mpi.py: paced.py FOLDER. Rank 0 is the server and writes paced.json."""

import json
import sys
from pathlib import Path

import numpy as np
from mpi4py import MPI

from grace_ext.adapters.mpi import FederatedClient, FederatedServer
from grace_ext.federated import Client, Server

D, SPEC, ROUNDS = 20_000, "topk:0.05/rice/raw", 6
PACES = None, 1e-6, 3600.0  # seconds of a round: no machine is so fast, or so slow


def main() -> None:
    comm, folder = MPI.COMM_WORLD, Path(sys.argv[1])
    start, found = np.zeros(D, np.float32), {}
    for pace in PACES:
        comm.Barrier()
        if comm.rank == 0:
            server = FederatedServer(Server(start, comm.size - 1, SPEC, memory="ef21"), comm, timeout=3600, pace=pace)
            reports = [server.round() for _ in range(ROUNDS)]
            found[str(pace)] = {
                "sent": reports[-1].sent,
                "received": reports[-1].received,
                "taken": len(reports[-1].taken),
                "silent": server.stop(),
                "bandwidths": [one.bandwidth for one in server.paces.values()],
            }
        else:
            random = np.random.default_rng(comm.rank)
            client = FederatedClient(Client(start, SPEC, memory="ef21", number=comm.rank - 1), comm)
            client.run(lambda model, _, random=random: (model + random.standard_normal(D).astype(np.float32), 1.0))
    if comm.rank == 0:
        (folder / "paced.json").write_text(json.dumps(found))


main()
