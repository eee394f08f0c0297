"""What a collective costs: the α–β model, fitted to timed collectives.

Hockney, The communication challenge for MPP, Parallel Computing 20 (1994): seconds = α + β · bytes. α holds all that does
not depend on the length, the library's negotiation and the messages' latencies among it.
"""

import dataclasses
import math
import time

import numpy as np

from .communicators.base import Transport

_SMALLEST, _LARGEST = 2**10, 2**23  # bytes of a payload
_LONG_ENOUGH = 0.01  # seconds: then bandwidth is what is measured
_TIMES = 3


@dataclasses.dataclass(frozen=True)
class Line:
    """alpha: seconds; beta: seconds per byte that a rank sends."""

    alpha: float
    beta: float

    def seconds(self, sent: float) -> float:
        return self.alpha + self.beta * sent


def fit(samples: list[tuple[float, float]]) -> Line:
    """The line through (bytes sent, seconds) with the least sum of squared relative errors and no negative coefficient."""
    sent, seconds = np.array(samples, np.float64).T
    columns = np.stack([1 / seconds, sent / seconds], axis=1)
    alpha, beta = np.linalg.lstsq(columns, np.ones(len(samples)), rcond=None)[0]
    if alpha < 0 or beta < 0:  # the best on the border of what is allowed is the best of either coefficient alone
        one = [column @ np.ones(len(samples)) / (column @ column) for column in columns.T]
        errors = [np.square(column * best - 1).sum() for column, best in zip(columns.T, one, strict=True)]
        alpha, beta = (one[0], 0.0) if errors[0] <= errors[1] else (0.0, one[1])
    return Line(float(alpha), float(beta))


def sent_by_a_rank(collective: str, ranks: int, payload: float) -> float:
    """Bytes that a rank sends: a ring's for an allreduce; for an allgather its payload to each other rank; for an alltoall
    the parts of others."""
    shares = {"allreduce": 2 * (ranks - 1) / ranks, "allgather": ranks - 1, "alltoall": (ranks - 1) / ranks}
    return shares[collective] * payload


def probe(transport: Transport, name: str, collective: str = "allreduce") -> list[tuple[float, float]]:
    """A collective, between steps: time some of these, of growing length -> (bytes sent, seconds), the same on all ranks.

    name: the same on all ranks. The longest takes 10 ms or has 8 MiB.
    """
    samples, payload = [], _SMALLEST
    while True:
        best = math.inf
        for _ in range(_TIMES):
            array = np.ones(payload // 4, np.float32)
            started = time.perf_counter()
            _start(transport, f"{name}.{collective}.{payload}", collective, array).wait()
            best = min(best, time.perf_counter() - started)
        mean = float(agreed(transport, name, np.array([best])).mean())
        samples.append((sent_by_a_rank(collective, transport.size, payload), mean))
        if mean >= _LONG_ENOUGH or payload >= _LARGEST:
            return samples
        payload *= 8


def _start(transport: Transport, name: str, collective: str, array: np.ndarray):
    if collective == "allreduce":
        return transport.allreduce(name, array)
    payload = array.view(np.uint8)
    if collective == "alltoall":
        return transport.alltoall(name, payload, [part.size for part in np.array_split(payload, transport.size)])
    return transport.allgather(name, payload)


def agreed(transport: Transport, name: str, own: np.ndarray) -> np.ndarray:
    """A collective: all ranks' float64[n], as float64[ranks, n], for decisions that have to be the same on all of them."""
    joined = transport.allgather(f"{name}.agreed", np.asarray(own, "<f8").view(np.uint8)).wait()
    return joined.copy().view("<f8").reshape(transport.size, -1)
