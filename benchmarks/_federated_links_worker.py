"""One rank of benchmarks/federated_links.py: rounds of FedAvg, and when each message leaves and arrives. Rank 0 is the server."""

import json
import statistics
import sys
import time

import _lib  # noqa: F401  (puts the examples' folder on the path)
import torch
from fashion_mnist import read_idx, scaled
from federated_training import MODELS, Epochs, lda_split, vector_of
from mpi4py import MPI

from grace_ext.adapters.mpi import FederatedClient, FederatedServer
from grace_ext.federated import Client, Server

SAMPLES = 6000  # of all clients; training is not measured
UNCOUNTED = 2  # rounds at first: kernels are loaded, and in the very first there is nothing to tell


class TimedServer(Server):
    """Notes when a message is handed over and when an update has arrived: all hosts have this machine's clock."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.handed_over, self.arrived, self.encoded, self.decoded = {}, {}, [], []

    def begin_round(self, compression=None):
        began = time.thread_time()
        chosen = super().begin_round(compression)
        self.encoded.append(time.thread_time() - began)
        return chosen

    def message_for(self, client):
        message = super().message_for(client)
        self.handed_over[self.round, client] = time.monotonic()
        return message

    def receive(self, client, message):
        self.arrived[self.round, client] = time.monotonic()
        began = time.thread_time()
        super().receive(client, message)
        self.decoded.append(time.thread_time() - began)


class TimedClient(Client):
    """Notes, for each round, when the model has arrived and when the update is handed over."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.arrived, self.handed_over, self.decoded, self.encoded = [], [], [], []

    def receive(self, message):
        self.arrived.append(time.monotonic())
        began = time.thread_time()
        found = super().receive(message)
        self.decoded.append(time.thread_time() - began)
        return found

    def update(self, trained, samples, compression=None):
        began = time.thread_time()
        message = super().update(trained, samples, compression)
        self.encoded.append(time.thread_time() - began)
        self.handed_over.append(time.monotonic())
        return message


def serve(start, options: dict, comm: MPI.Comm) -> dict:
    """Run the rounds, and return the seconds of messages and codecs, medians over clients and rounds."""
    core = TimedServer(start, comm.size - 1, options["compression"], weights="samples", most_samples=SAMPLES, seed=0)
    server = FederatedServer(core, comm, timeout=120)
    reports = [server.round() for _ in range(options["rounds"])]
    server.stop()
    if any(report.missing or report.rejected for report in reports):
        raise RuntimeError("not all clients took part in every round")
    clients = comm.gather(None)[1:]
    down, up = [], []
    for number, client in enumerate(clients):
        for round_ in range(UNCOUNTED, options["rounds"]):
            key = reports[round_].round, number
            down.append(client["arrived"][round_] - core.handed_over[key])
            up.append(core.arrived[key] - client["handed_over"][round_])
    counted = reports[UNCOUNTED:]
    messages = len(counted) * len(clients)
    return {
        "down": statistics.median(down),
        "up": statistics.median(up),
        "client_decodes": statistics.median(s for client in clients for s in client["decoded"][UNCOUNTED:]),
        "client_encodes": statistics.median(s for client in clients for s in client["encoded"][UNCOUNTED:]),
        "server_decodes": statistics.median(core.decoded[UNCOUNTED * len(clients) :]),
        "server_encodes": statistics.median(core.encoded[UNCOUNTED:]),
        "down_bytes": sum(report.sent for report in counted) / messages,
        "up_bytes": sum(report.received for report in counted) / messages,
        "parameters": start.size,
    }


def take_part(start, net: torch.nn.Module, options: dict, comm: MPI.Comm) -> None:
    number = comm.rank - 1
    images, labels = (read_idx(options["data"], f"train-{name}-ubyte")[:SAMPLES] for name in ("images-idx3", "labels-idx1"))
    mine = torch.from_numpy(lda_split(labels.numpy(), comm.size - 1, 0.5, 0)[number])
    client = TimedClient(start, options["compression"], number=number, seed=0)
    train = Epochs(net, scaled(images[mine]), labels[mine].long(), batch=64, number=number, seed=0, epochs=1, lr=0.001)
    FederatedClient(client, comm).run(train)
    comm.gather({name: getattr(client, name) for name in ("arrived", "handed_over", "decoded", "encoded")})


def main() -> None:
    options, comm = json.loads(sys.argv[1]), MPI.COMM_WORLD
    torch.set_num_threads(1)
    torch.manual_seed(0)
    net = MODELS["mlp"]()
    start = vector_of(net)
    if comm.rank:
        take_part(start, net, options, comm)
        return
    found = serve(start, options, comm)
    with open(options["out"], "w") as file:
        json.dump(found, file)


if __name__ == "__main__":
    main()
