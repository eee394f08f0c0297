"""The seconds of a transport's collectives, measured between steps, and numbers of which all ranks know the same."""

import math
import time

import numpy as np

from .base import CollectiveHandle, Transport

_LARGEST = 2**23  # bytes of a payload
_LONG_ENOUGH = 0.01  # seconds; then bandwidth dominates
_TIMES = 3


def time_collectives(
    transport: Transport, name: str, collective: str = "allreduce", smallest: int = 2**10
) -> list[tuple[int, float]]:
    """Time collectives of growing length, until one takes 10 ms or has 8 MiB. A collective, between steps.

    Args:
        transport: What `Transport.probe_transport` returned.
        name: What the collectives' names begin with, the same on all ranks.
        collective: "allreduce", "alltoall" or "allgather".
        smallest: The bytes of the first payload, a multiple of 4.

    Returns:
        (bytes of the payload, seconds) of each length, the same on all ranks.
    """
    samples, payload = [], smallest
    while True:
        best = math.inf
        for _ in range(_TIMES):
            array = np.ones(payload // 4, np.float32)
            started = time.perf_counter()
            _start(transport, f"{name}.{collective}.{payload}", collective, array).wait()
            best = min(best, time.perf_counter() - started)
        # Ranks measure different times and have to agree on whether to go on.
        mean = float(agreed(transport, name, np.array([best])).mean())
        samples.append((payload, mean))
        if mean >= _LONG_ENOUGH or payload >= _LARGEST:
            return samples
        payload *= 8


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
