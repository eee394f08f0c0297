"""One rank of a run of benchmarks/scaling.py, which starts it: _scaling_worker.py OPTIONS, with the options as JSON.

It exchanges synthetic gradients, without a model, and times collectives, first over Horovod and then over torch.distributed. Rank 0
writes the measurements of all ranks, a JSON object, to options["out"]. Before it measures anything, each rank makes a file
options["out"].ready.RANK and waits for options["out"].go: by then its host's processor time has been limited.
"""

import contextlib
import functools
import json
import os
import socket
import statistics
import sys
import time

import horovod.torch as hvd
import numpy as np
import torch
import torch.distributed as dist
from _hosts import wait_until
from scaling import METHODS, gradient_of

import grace_ext
from grace_ext.adapters._common import waiting
from grace_ext.adapters._torch.ddp_transport import GroupTransport
from grace_ext.adapters.horovod_torch import HorovodTransport
from grace_ext.exchange.buckets import Tensor
from grace_ext.exchange.engine import Exchange
from grace_ext.exchange.scheduler import CallersThread
from grace_ext.pipeline.spec import parse_stage
from grace_ext.transport import TransportWrapper

WARM_UP = 3
GRADIENTS = 3  # used in turns, so that the residual is not always that of the same gradient
PROBES = [2**10, 2**13, 2**16, 2**19, 2**22]  # bytes
PROBED = 9  # repetitions of a probe
LONGEST_PROBE = 1.0  # seconds; after a payload that took a quarter of it, no larger one is tried
AT_LEAST = 5  # the fewest steps
IDLE = 1.0  # seconds of Horovod's coordination alone
ROUND_TRIPS = 300


class OverHorovod:
    """Horovod's collectives."""

    executor = None  # a thread of the exchange's own, as in the adapter

    def transport(self):
        return HorovodTransport(hvd.global_process_set)

    def mean_of_halves(self, tensor: torch.Tensor, out: torch.Tensor) -> None:
        """As hvd.allreduce with hvd.Compression.fp16, but not waiting as it does: to ask each millisecond takes half of a tenth
        of a core."""
        half, dtype = hvd.Compression.fp16.compress(tensor)
        handle = hvd.allreduce_async(half, name="fp16")
        waiting.wait_until(lambda: hvd.poll(handle), local_size())
        hvd.Compression.fp16.decompress(hvd.synchronize(handle), dtype)

    def largest(self, seconds: list[float]) -> list[float]:
        """The largest of all ranks, element by element."""
        return hvd.allreduce(torch.tensor(seconds), name=f"largest.{len(seconds)}", op=hvd.Max).tolist()


class OverTorch:
    """The collectives of torch.distributed, over Gloo, one of them at a time."""

    executor = CallersThread()

    def transport(self):
        return GroupTransport(dist.group.WORLD, torch.device("cpu"))

    def mean_of_halves(self, tensor: torch.Tensor, out: torch.Tensor) -> None:
        half = tensor.half().div_(dist.get_world_size())  # as DDP's fp16_compress_hook
        dist.all_reduce(half)
        out.copy_(half)

    def largest(self, seconds: list[float]) -> list[float]:
        found = torch.tensor(seconds)
        dist.all_reduce(found, dist.ReduceOp.MAX)
        return found.tolist()


class Clocked(TransportWrapper):
    """Forwards collectives and keeps their seconds.

    If `apart`, each collective starts when all ranks have reached it, so that its seconds include no codec work of other
    ranks.
    """

    def __init__(self, library):
        super().__init__(library.transport())
        self.apart, self.seconds, self._library = False, [], library

    def start_collective(self, kind, name, array, *args):
        if self.apart:
            self._library.largest([0.0])
        started = time.perf_counter()
        return (
            super()
            .start_collective(kind, name, array, *args)
            .on_end(lambda ended, _: self.seconds.append(ended - started) if self.apart else None)
        )


class Compressed:
    """A method of grace_ext, with everything in one bucket."""

    def __init__(self, label: str, elements: int, library):
        method = METHODS[label]
        self.clock = Clocked(library)
        self._exchange = Exchange(self.clock, method.memory, 1 / self.clock.size, executor=library.executor)
        self._bucket = self._exchange.bucket(
            label,
            [Tensor(label, elements, 2)],
            grace_ext.compressor(method.spec),
            parse_stage("communicator", method.communicator),
        )
        self._exchange.set_buckets([self._bucket])
        digests = self.clock.allgather(f"{label}.config", self._exchange.config_digest())
        self._exchange.check_config_digests(digests.wait())
        self._out = np.empty(elements, np.float32)

    def step(self, gradient):
        self._exchange.start(self._bucket, lambda out: np.copyto(out, gradient))
        self._exchange.advance()
        self._exchange.finish(self._bucket, self._out)
        self._exchange.end_step()

    def payload(self) -> int:
        """Return the bytes so far."""
        return self._exchange.stats()["bytes_out"]

    def close(self):
        self._exchange.close()


class Plain:
    """The library's own allreduce of float16."""

    def __init__(self, label: str, elements: int, library):
        self.clock = Clocked(library)
        self._library, self._sent, self._out = library, 0, torch.empty(elements)

    def step(self, gradient):
        self._sent += 2 * gradient.size
        if self.clock.apart:
            self.clock.allreduce("fp16 apart", torch.from_numpy(gradient).half().numpy()).wait()
        else:
            self._library.mean_of_halves(torch.from_numpy(gradient), self._out)

    def payload(self):
        return self._sent

    def close(self):
        pass


def measure(method, library, gradients, steps: int, seconds: float) -> dict:
    """Measure this rank: "steps", seconds of each; "apart", seconds of the collectives of other steps; bytes per step."""

    def step(number):
        started = time.perf_counter()
        method.step(gradients[number % len(gradients)])
        return time.perf_counter() - started

    warm = [step(number) for number in range(WARM_UP)]
    [longest] = library.largest(warm[-1:])
    steps = min(steps, max(AT_LEAST, round(seconds / longest)))
    library.largest([0.0])
    payload, sent = method.payload(), bytes_sent()
    taken = [step(number) for number in range(steps)]
    library.largest([0.0])
    payload, sent = method.payload() - payload, bytes_sent() - sent
    method.clock.apart, apart = True, []
    for number in range(steps):
        method.clock.seconds.clear()
        step(number)
        apart.append(list(method.clock.seconds))
    method.close()
    return {"steps": taken, "apart": apart, "payload": payload / steps, "sent": sent / steps}


def probe(library) -> list[tuple[str, int, float]]:
    """Return (collective, payload bytes of a rank, seconds of the slowest rank)."""
    clock, found = Clocked(library), []
    clock.apart = True
    # Values as gradients have them: how long libraries take to add float16 depends on them.
    halves = np.random.default_rng(clock.rank).standard_normal(max(PROBES) // 2, np.float32).astype(np.float16)
    for collective in ("allreduce", "allgather", "alltoall"):
        for payload in PROBES:
            clock.seconds.clear()
            for number in range(PROBED):
                name = f"probe.{collective}"
                if collective == "allreduce":
                    clock.allreduce(name, halves[: payload // 2].copy()).wait()
                    continue
                # Containers are never of the same length, of which Horovod would take notice.
                data = np.ones(payload - number, np.uint8)
                if collective == "allgather":
                    clock.allgather(name, data).wait()
                else:
                    splits = np.full(clock.size, data.size // clock.size)
                    splits[clock.rank] = 0
                    clock.alltoall(name, data[: splits.sum()], splits.tolist()).wait()
            slowest = statistics.median(library.largest(clock.seconds))
            found.append((collective, payload, slowest))
            if slowest > LONGEST_PROBE / 4:
                break
    return found


@functools.cache
def local_size() -> int:
    return hvd.local_size()


def bytes_sent() -> int:
    """Return what this host has sent on its link, as `mpirun/hosts bytes` counts, divided by its ranks."""
    with open("/proc/self/net/dev") as file:
        [counts] = (line.split(":")[1].split() for line in file if line.strip().startswith("eth0:"))
    return int(counts[8]) // local_size()


def idle(library) -> float:
    """Return the bytes per second that a rank sends while all are idle."""
    library.largest([0.0])
    before = bytes_sent()
    time.sleep(IDLE)
    return (bytes_sent() - before) / IDLE


def own_address() -> str:
    return socket.gethostbyname(socket.gethostname())


def message_seconds() -> float:
    """Measure a message of one byte from the first host to the second: half of a round trip, without Horovod."""
    taken = 0.0
    with contextlib.ExitStack() as opened:
        if hvd.rank() == 0:
            listener = opened.enter_context(socket.create_server((own_address(), 0)))
        address = hvd.broadcast_object(listener.getsockname() if hvd.rank() == 0 else None, name="address")
        if hvd.rank() < 2:
            connection = listener.accept()[0] if hvd.rank() == 0 else socket.create_connection(address)
            opened.enter_context(connection).setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            trips = []
            for _ in range(ROUND_TRIPS):
                started = time.perf_counter()
                if hvd.rank() == 0:
                    connection.sendall(b"x")
                connection.recv(1)
                if hvd.rank() == 1:
                    connection.sendall(b"x")
                trips.append(time.perf_counter() - started)
            taken = statistics.median(trips) / 2
        hvd.barrier()
    return taken


def measure_all(name: str, library, gradients, options: dict) -> dict:
    """Measure the methods of one library, by label."""
    found = {}
    for label in options["methods"]:
        if METHODS[label].library == name:
            method = (Compressed if METHODS[label].communicator else Plain)(label, options["elements"], library)
            found[label] = measure(method, library, gradients, options["steps"], options["seconds"])
    return found


def main() -> None:
    options = json.loads(sys.argv[1])
    hvd.init()
    torch.set_num_threads(1)
    rank, ranks = hvd.rank(), hvd.size()
    local_size()  # before the shutdown
    gradients = [gradient_of(options["elements"], rank, step) for step in range(GRADIENTS)]
    open(f"{options['out']}.ready.{rank}", "w").close()
    if not wait_until(lambda: os.path.exists(f"{options['out']}.go")):
        sys.exit("the benchmark does not go on")
    library = OverHorovod()
    result = {"idle": idle(library), "message": message_seconds(), "probes": {}}
    if options["probes"]:
        result["probes"]["Horovod"] = probe(library)
    result["methods"] = measure_all("Horovod", library, gradients, options)
    port = None
    if rank == 0:
        with socket.create_server((own_address(), 0)) as free:
            port = free.getsockname()
    port = hvd.broadcast_object(port, name="port")
    hvd.shutdown()  # its coordination would take its share of the core
    dist.init_process_group("gloo", f"tcp://{port[0]}:{port[1]}", rank=rank, world_size=ranks)
    library = OverTorch()
    if options["probes"]:
        result["probes"]["torch"] = probe(library)
    result["methods"] |= measure_all("torch", library, gradients, options)
    everything = [None] * ranks if rank == 0 else None
    dist.gather_object(result, everything)
    if rank == 0:
        with open(options["out"], "w") as file:
            json.dump(everything, file)
    dist.destroy_process_group()


main()
