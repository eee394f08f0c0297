"""The cost of this run's collectives, timed between steps, and an exchange of numbers on which all ranks decide alike."""

import math
import time

import numpy as np

from ..transport.base import CollectiveHandle, Transport
from .cost_model import Collective, alltoall, ring_allgather, ring_allreduce

_SMALLEST, _LARGEST = 2**10, 2**23  # bytes of a payload
_LONG_ENOUGH = 0.01  # seconds; then bandwidth dominates
_TIMES = 3


def probe(transport: Transport, name: str, collective: str = "allreduce") -> list[tuple[int, float, float]]:
    """Time collectives of growing length, until one takes 10 ms or has 8 MiB. A collective, between steps.

    Args:
        transport: What `Transport.probe_transport` returned.
        name: Name of the collectives, the same on all ranks.
        collective: "allreduce", "alltoall" or "allgather".

    Returns:
        (rounds, path, seconds) of each length, as cost_model.fit takes them; the same on all ranks.
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
        model = _model(collective, transport.size, payload)
        samples.append((model.rounds, model.path, mean))
        if mean >= _LONG_ENOUGH or payload >= _LARGEST:
            return samples
        payload *= 8


def _model(collective: str, ranks: int, payload: int) -> Collective:
    if collective == "allreduce":
        return ring_allreduce(ranks, payload)
    if collective == "alltoall":
        return alltoall(np.full((ranks, ranks), payload / ranks))
    return ring_allgather([payload] * ranks)


def _start(transport: Transport, name: str, collective: str, array: np.ndarray) -> CollectiveHandle:
    if collective == "allreduce":
        return transport.allreduce(name, array)
    payload = array.view(np.uint8)
    if collective == "alltoall":
        return transport.alltoall(name, payload, [part.size for part in np.array_split(payload, transport.size)])
    return transport.allgather(name, payload)


def agreed(transport: Transport, name: str, own: np.ndarray) -> np.ndarray:
    """Gather all ranks' numbers, for decisions that have to be the same on all of them. A collective.

    Args:
        transport: What `Transport.probe_transport` returned.
        name: What the collective's name begins with, the same on all ranks.
        own: This rank's numbers, float64[n].

    Returns:
        float64[ranks, n].
    """
    joined = transport.allgather(f"{name}.agreed", np.asarray(own, "<f8").view(np.uint8)).wait()
    return joined.copy().view("<f8").reshape(transport.size, -1)
