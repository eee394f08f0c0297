"""Federated training on Fashion-MNIST over MPI: rank 0 is the server, the other ranks are clients with different data.

    mpirun -n 11 python examples/fedavg_fashion_mnist.py --data DIR

--method fedavg is Algorithm 2 of DeepReduce (Xu, Kostopoulou, Dutta et al., NeurIPS 2021): clients train for some epochs,
and containers are sent both ways. --method panthalia is central AdamW: clients send gradients, the server takes the steps.
"""

import argparse
import contextlib
import json
import os
import sys
import time

import numpy as np
import torch
from fashion_mnist import load, read_idx, scaled
from federated_training import MODELS, Epochs, Gradient, evaluate, lda_split, set_vector, vector_of
from mpi4py import MPI
from tqdm import tqdm

from grace_ext import ConfigError, compressor
from grace_ext.adapters.mpi import FederatedClient, FederatedServer
from grace_ext.federated import Client, Server

#: method -> compression, rounds
DEFAULTS = {"fedavg": ("topk:0.1/rice/lloyd:0.05", 40), "panthalia": ("panthalia", 1000)}
TRAIN_SAMPLES = 60000  # samples of Fashion-MNIST; no client has more
NOT_KEPT = ("data", "state", "out", "rounds", "timeout", "pace")  # options that may change when a job is resumed


@contextlib.contextmanager
def timed(seconds: dict[str, float], what: str):
    """Add the CPU time of this thread to seconds[what]; wall time would mislead, because the ranks share cores."""
    began = time.thread_time()
    yield
    seconds[what] += time.thread_time() - began


def meet(comm: MPI.Comm) -> None:
    """Wait for all ranks. Unlike MPI's own barrier, this leaves the cores to the ranks that still work."""
    request = comm.Ibarrier()
    while not request.Test():
        time.sleep(0.01)


class State:
    """The state that a rank keeps in the file PATH.RANK.npz, and the state before it. path None: nothing is kept.

    A job that is killed within a round continues after the server's last round, so clients may need the state before.
    """

    def __init__(self, path: str | None, rank: int):
        self._last, self._before = (f"{path}.{rank}.npz", f"{path}.{rank}.before.npz") if path else (None, None)

    def save(self, **content) -> None:
        if self._last is None:
            return
        with open(f"{self._last}.new", "wb") as file:
            np.savez(file, **content)
        if os.path.exists(self._last):
            os.replace(self._last, self._before)
        os.replace(f"{self._last}.new", self._last)

    def load(self, round_: int) -> dict | None:
        """Return the last state up to that round, None if there is none; states of later rounds are removed."""
        for path in filter(os.path.exists, (self._last, self._before) if self._last else ()):
            with np.load(path, allow_pickle=False) as file:
                content = dict(file)
            if content["round"] <= round_:
                os.replace(path, self._last)
                return content
        return None


class MeasuredServer(Server):
    """Measures CPU seconds: "encode", making the containers; "decode", all updates of a round and the optimizer's step."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.seconds = {"encode": 0.0, "decode": 0.0}

    def begin_round(self, compression=None):
        with timed(self.seconds, "encode"):
            return super().begin_round(compression)

    def receive(self, client, message):
        with timed(self.seconds, "decode"):
            super().receive(client, message)

    def end_round(self):
        with timed(self.seconds, "decode"):
            return super().end_round()


class KeptClient(Client):
    """Measures CPU seconds, and saves its state before an update is sent."""

    def __init__(self, *args, state: State, **options):
        super().__init__(*args, **options)
        self.seconds, self.updates, self._state = {"encode": 0.0, "decode": 0.0}, 0, state

    def receive(self, message):
        with timed(self.seconds, "decode"):
            return super().receive(message)

    def update(self, trained, samples, compression=None):
        with timed(self.seconds, "encode"):
            message = super().update(trained, samples, compression)
        self.updates += 1
        self._state.save(**self.state_dict())
        return message


class Serving:
    """Rank 0: the server, what it measures and the state that it keeps."""

    def __init__(self, start: np.ndarray, net: torch.nn.Module, args, comm: MPI.Comm):
        self.args, self.comm, self.net, self.test = args, comm, net, load(args.data, "t10k")
        adamw = f"adamw:{args.lr}:weight_decay={args.weight_decay}:steps={args.lr_rounds or 0}:beta1={args.beta1}"
        self.core = MeasuredServer(
            start,
            comm.size - 1,
            args.compression,
            sampled=args.sampled,
            optimizer=adamw if args.method == "panthalia" else None,
            weights="samples",
            most_samples=args.train_samples or TRAIN_SAMPLES,
            memory=args.memory,
            seed=args.seed,
        )
        self.options = {key: value for key, value in vars(args).items() if key not in NOT_KEPT} | {"clients": comm.size - 1}
        #: For each round, bytes and numbers of messages; "accuracy": [round, accuracy] of each evaluation.
        self.log = {"sent": [], "messages_sent": [], "received": [], "messages_received": [], "rejected": [], "accuracy": []}
        self.state = State(args.state, 0)

    def resume(self) -> int:
        """Load the state, and return the round after which training continues."""
        if self.args.state and os.path.exists(self.args.state):
            self.core.load(self.args.state)
            kept = self.state.load(self.core.round)
            if kept is None or json.loads(str(kept.pop("options"))) != self.options:
                raise ConfigError(f"{self.args.state} is the state of a job with other options")
            self.log = json.loads(str(kept.pop("log")))
        return self.core.round

    def keep(self) -> None:
        if self.args.state:
            self.state.save(round=self.core.round, options=json.dumps(self.options), log=json.dumps(self.log))
            self.core.save(self.args.state)

    def run(self) -> None:
        server = FederatedServer(self.core, self.comm, timeout=self.args.timeout, pace=self.args.pace)
        progress = tqdm(
            range(self.core.round, self.args.rounds), initial=self.core.round, total=self.args.rounds, unit="round"
        )
        done = self.core.round
        for _ in progress:
            report = server.round()
            for key, value in {
                "sent": report.sent,
                "received": report.received,
                "messages_received": len(report.taken),
                "messages_sent": len({*report.taken, *report.missing, *report.rejected}),
                "rejected": len(report.rejected),
            }.items():
                self.log[key].append(value)
            if report.round % self.args.evaluate_every == 0 or report.round == self.args.rounds:
                self.evaluate()
                progress.write(f"round {report.round}: {self.summary()}")
            self.keep()
        if silent := server.stop(self.args.timeout):
            raise RuntimeError(f"clients {silent} did not answer when the server stopped")
        meet(self.comm)
        self.write(self.core.round - done, self.comm.gather(None))

    def evaluate(self) -> None:
        set_vector(self.net, self.core.model)
        self.log["accuracy"].append([self.core.round, evaluate(self.net, *self.test)])

    def summary(self) -> str:
        down, up = self.volumes()
        return f"accuracy {self.log['accuracy'][-1][1]:.2%}, relative data volume down {down:.4f}, up {up:.4f}"

    def volumes(self) -> tuple[float, float]:
        """Compute the bytes of all messages, down and up, relative to the same messages as float32.

        The first round's messages down are left out: all clients begin with the same model, so that they hold nothing.
        """
        whole = 4 * self.core.model.size
        return tuple(
            sum(self.log[way][first:]) / max(1, whole * sum(self.log[f"messages_{way}"][first:]))
            for way, first in (("sent", 1), ("received", 0))
        )

    def write(self, rounds: int, clients: list) -> None:
        """Print and write the results. rounds: of this run. clients: for each rank, seconds and the number of updates."""
        updates = max(1, sum(count for _, count in clients[1:]))
        means = {
            f"client_{what}": sum(seconds[what] for seconds, _ in clients[1:]) / updates for what in ("decode", "encode")
        }
        means |= {f"server_{what}": self.core.seconds[what] / max(1, rounds) for what in ("decode", "encode")}
        tqdm.write(
            f"{self.summary()}; CPU ms: "
            + ", ".join(f"{what.replace('_', ' ')} {1000 * value:.2f}" for what, value in means.items())
        )
        if self.args.out:
            down, up = self.volumes()
            with open(f"{self.args.out}.new", "w", encoding="utf-8") as file:
                json.dump(
                    {
                        "options": {**self.options, "rounds": self.args.rounds},
                        "parameters": self.core.model.size,
                        "volume": {"down": down, "up": up},
                        "cpu_seconds": means,
                        **self.log,
                    },
                    file,
                )
            os.replace(f"{self.args.out}.new", self.args.out)


def take_part(start: np.ndarray, net: torch.nn.Module, args, comm: MPI.Comm, resumed: int) -> None:
    """Run a client's rank."""
    number = comm.rank - 1
    images, labels = (
        read_idx(args.data, f"train-{name}-ubyte")[: args.train_samples] for name in ("images-idx3", "labels-idx1")
    )
    mine = torch.from_numpy(lda_split(labels.numpy(), comm.size - 1, args.alpha, args.seed)[number])
    data = {
        "images": scaled(images[mine]),
        "labels": labels[mine].long(),
        "batch": args.batch,
        "number": number,
        "seed": args.seed,
    }
    if args.method == "fedavg":
        train = Epochs(net, **data, epochs=args.local_epochs, lr=args.lr)
    else:
        train = Gradient(net, **data, batches=args.local_batches)
    state = State(args.state, comm.rank)
    client = KeptClient(start, args.compression, memory=args.memory, number=number, seed=args.seed, state=state)
    if kept := state.load(resumed):
        client.load_state_dict(kept)
    FederatedClient(client, comm).run(train)
    meet(comm)
    comm.gather((client.seconds, client.updates))


def parse_args():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", required=True, help="folder of the data set (see mpirun/fetch_fashion_mnist.py)")
    parser.add_argument("--method", choices=DEFAULTS, default="fedavg")
    parser.add_argument(
        "--compression",
        metavar="SPEC",
        help="compression in both directions; dense/raw: none (default: "
        + ", ".join(f"{spec} for {method}" for method, (spec, _) in DEFAULTS.items())
        + ")",
    )
    parser.add_argument("--memory", choices=("residual", "ef21", "none"), default="residual", help="memory of the clients")
    parser.add_argument(
        "--rounds",
        type=int,
        help="total number of rounds, including those before a resume (default: "
        + ", ".join(f"{rounds} for {method}" for method, (_, rounds) in DEFAULTS.items())
        + ")",
    )
    parser.add_argument("--sampled", type=int, metavar="M", help="number of clients per round (default: all)")
    parser.add_argument("--local-epochs", type=int, default=1, help="epochs per round, for fedavg")
    parser.add_argument("--local-batches", type=int, default=1, help="batches per gradient, for panthalia")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument(
        "--lr", type=float, default=0.001, help="learning rate of Adam on the clients, or of AdamW on the server"
    )
    parser.add_argument(
        "--lr-rounds",
        type=int,
        metavar="N",
        help="rounds over which AdamW's learning rate decays to 0 (default: it does not)",
    )
    parser.add_argument("--weight-decay", type=float, default=0.01, help="weight decay of AdamW")
    parser.add_argument(
        "--beta1",
        type=float,
        help="factor of AdamW's first moment (default: 0.9; 0 with a sparse compression, because error feedback sums the gradients "
        "of many rounds already)",
    )
    parser.add_argument(
        "--alpha", type=float, default=0.5, help="parameter of the split: the smaller, the more clients differ"
    )
    parser.add_argument("--model", choices=MODELS, default="mlp")
    parser.add_argument("--train-samples", type=int, metavar="N", help="use only this many samples in all")
    parser.add_argument("--evaluate-every", type=int, default=1, metavar="ROUNDS")
    parser.add_argument("--timeout", type=float, default=300, metavar="SECONDS", help="how long a round waits for updates")
    parser.add_argument(
        "--pace",
        type=float,
        metavar="SECONDS",
        help="duration that a round should have: densities follow the bandwidth (Kimad; default: constant densities)",
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--state",
        metavar="FILE",
        help="save the state there, and in files next to it, after each round; resume from it if it exists",
    )
    parser.add_argument("--out", metavar="FILE", help="write a JSON object: options, accuracy, bytes, seconds")
    args = parser.parse_args()
    spec, rounds = DEFAULTS[args.method]
    args.compression, args.rounds = args.compression or spec, args.rounds or rounds
    try:
        is_dense = compressor(args.compression).dense
        args.beta1 = (0.9 if is_dense else 0.0) if args.beta1 is None else args.beta1
    except ConfigError as error:
        parser.error(str(error))
    return args


def main() -> None:
    args, comm = parse_args(), MPI.COMM_WORLD
    if comm.size < 2:
        sys.exit("there are no clients; run: mpirun -n 11 python examples/fedavg_fashion_mnist.py --data DIR")
    torch.set_num_threads(1)
    torch.manual_seed(args.seed)
    net = MODELS[args.model]()
    start = vector_of(net)
    if comm.rank == 0:
        serving = Serving(start, net, args, comm)
        resumed = serving.resume()
        meet(comm)
        comm.bcast(resumed)
        serving.run()
    else:
        meet(comm)
        take_part(start, net, args, comm, comm.bcast(None))


if __name__ == "__main__":
    main()
