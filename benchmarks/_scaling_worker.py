"""One rank of a run of benchmarks/scaling.py, which starts it: _scaling_worker.py OPTIONS, with the options as JSON.

It exchanges synthetic gradients, without a model, and times collectives. Rank 0 writes the measurements of all ranks, a JSON
object, to options["out"].
"""

import contextlib
import json
import socket
import statistics
import sys
import time

import horovod.torch as hvd
import numpy as np
import torch
from scaling import METHODS, gradient_of

import grace_ext
from grace_ext.adapters.horovod_torch import HorovodTransport
from grace_ext.exchange.buckets import Tensor
from grace_ext.exchange.engine import Exchange
from grace_ext.pipeline.spec import parse_stage
from grace_ext.transport import TransportWrapper

WARM_UP = 3
GRADIENTS = 3  # used in turns, so that the residual is not always that of the same gradient
PROBES = [2**10, 2**13, 2**16, 2**19, 2**22]  # bytes
PROBED = 9  # repetitions of a probe
LONGEST_PROBE = 0.5  # seconds; after a longer probe, no larger payload is tried
AT_LEAST = 5  # the fewest steps
IDLE = 1.0  # seconds of Horovod's coordination alone
ROUND_TRIPS = 300


def barrier() -> None:
    hvd.allreduce(torch.zeros(1), name="barrier", op=hvd.Sum)


class Clocked(TransportWrapper):
    """Forwards collectives and keeps their seconds.

    If `apart`, each collective starts when all ranks have reached it, so that its seconds include no codec work of other
    ranks.
    """

    def __init__(self, transport):
        super().__init__(transport)
        self.apart, self.seconds = False, []

    def start_collective(self, kind, name, array, *args):
        if self.apart:
            barrier()
        started = time.perf_counter()
        return (
            super()
            .start_collective(kind, name, array, *args)
            .on_end(lambda ended, _: self.seconds.append(ended - started) if self.apart else None)
        )


class Compressed:
    """A method of grace_ext, with everything in one bucket."""

    def __init__(self, label: str, elements: int):
        spec, communicator, memory, _ = METHODS[label]
        self.clock = Clocked(HorovodTransport(hvd.global_process_set))
        self._exchange = Exchange(self.clock, memory, 1 / hvd.size())
        self._bucket = self._exchange.bucket(
            label, [Tensor(label, elements, 2)], grace_ext.compressor(spec), parse_stage("communicator", communicator)
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
    """Horovod's own allreduce of float16."""

    def __init__(self, label: str, elements: int):
        self.clock = Clocked(HorovodTransport(hvd.global_process_set))
        self._label, self._sent = label, 0

    def step(self, gradient):
        tensor = torch.from_numpy(gradient)
        self._sent += 2 * gradient.size
        if self.clock.apart:
            half, context = hvd.Compression.fp16.compress(tensor)
            half = self.clock.allreduce(self._label, half.numpy()).wait()
            hvd.Compression.fp16.decompress(torch.from_numpy(half), context)
        else:
            hvd.allreduce(tensor, name=self._label, compression=hvd.Compression.fp16)

    def payload(self):
        return self._sent

    def close(self):
        pass


def measure(method, gradients, steps: int, seconds: float) -> dict:
    """Measure this rank: "steps", seconds of each; "apart", seconds of the collectives of other steps; bytes per step."""

    def step(number):
        started = time.perf_counter()
        method.step(gradients[number % len(gradients)])
        return time.perf_counter() - started

    warm = [step(number) for number in range(WARM_UP)]
    longest = float(hvd.allreduce(torch.tensor(warm[-1]), name="longest", op=hvd.Max))
    steps = min(steps, max(AT_LEAST, round(seconds / longest)))
    barrier()
    payload, sent = method.payload(), bytes_sent()
    taken = [step(number) for number in range(steps)]
    barrier()
    payload, sent = method.payload() - payload, bytes_sent() - sent
    method.clock.apart, apart = True, []
    for number in range(steps):
        method.clock.seconds.clear()
        step(number)
        apart.append(list(method.clock.seconds))
    method.close()
    return {"steps": taken, "apart": apart, "payload": payload / steps, "sent": sent / steps}


def probe() -> list[tuple[str, int, float]]:
    """Return (collective, payload bytes of a rank, seconds of the slowest rank)."""
    clock, found = Clocked(HorovodTransport(hvd.global_process_set)), []
    clock.apart = True
    for collective in ("allreduce", "allgather", "alltoall"):
        for payload in PROBES:
            clock.seconds.clear()
            for number in range(PROBED):
                name = f"probe.{collective}"
                if collective == "allreduce":
                    clock.allreduce(name, np.ones(payload // 2, np.float16)).wait()
                    continue
                # Containers are never of the same length, of which Horovod would take notice.
                data = np.ones(payload - number, np.uint8)
                if collective == "allgather":
                    clock.allgather(name, data).wait()
                else:
                    splits = np.full(clock.size, data.size // clock.size)
                    splits[clock.rank] = 0
                    clock.alltoall(name, data[: splits.sum()], splits.tolist()).wait()
            slowest = statistics.median(hvd.allreduce(torch.tensor(clock.seconds), name="slowest", op=hvd.Max).tolist())
            found.append((collective, payload, slowest))
            if slowest > LONGEST_PROBE / 4:
                break
    return found


def bytes_sent() -> int:
    """Return what this host has sent on its link, as `mpirun/hosts bytes` counts, divided by its ranks."""
    with open("/proc/self/net/dev") as file:
        [counts] = (line.split(":")[1].split() for line in file if line.strip().startswith("eth0:"))
    return int(counts[8]) // hvd.local_size()


def idle() -> float:
    """Return the bytes per second that a rank sends while all are idle."""
    barrier()
    before = bytes_sent()
    time.sleep(IDLE)
    return (bytes_sent() - before) / IDLE


def message_seconds() -> float:
    """Measure a message of one byte from the first host to the second: half of a round trip, without Horovod."""
    taken = 0.0
    with contextlib.ExitStack() as opened:
        if hvd.rank() == 0:
            listener = opened.enter_context(socket.create_server((socket.gethostbyname(socket.gethostname()), 0)))
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
        barrier()
    return taken


def main() -> None:
    options = json.loads(sys.argv[1])
    hvd.init()
    torch.set_num_threads(1)
    result = {"idle": idle(), "probes": probe(), "message": message_seconds(), "methods": {}}
    gradients = [gradient_of(options["elements"], hvd.rank(), step) for step in range(GRADIENTS)]
    for label in options["methods"]:
        method = (Compressed if METHODS[label][1] else Plain)(label, options["elements"])
        result["methods"][label] = measure(method, gradients, options["steps"], options["seconds"])
    everything = hvd.allgather_object(result)
    if hvd.rank() == 0:
        with open(options["out"], "w") as file:
            json.dump(everything, file)


main()
