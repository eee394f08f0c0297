"""The cost of this run's collectives, as the cost model's `fit` takes it."""

import numpy as np

from ..transport.base import Transport
from ..transport.link_probe import time_collectives
from .cost_model import Collective, alltoall, ring_allgather, ring_allreduce


def probe(transport: Transport, name: str, collective: str = "allreduce") -> list[tuple[int, float, float]]:
    """Time collectives of growing length. A collective, between steps; see `time_collectives`.

    Args:
        transport: What `Transport.probe_transport` returned.
        name: What the collectives' names begin with, the same on all ranks.
        collective: "allreduce", "alltoall" or "allgather".

    Returns:
        (rounds, path, seconds) of each length, as cost_model.fit takes them; the same on all ranks.
    """
    samples = []
    for payload, seconds in time_collectives(transport, name, collective):
        model = _model(collective, transport.size, payload)
        samples.append((model.rounds, model.path, seconds))
    return samples


def _model(collective: str, ranks: int, payload: int) -> Collective:
    if collective == "allreduce":
        return ring_allreduce(ranks, payload)
    if collective == "alltoall":
        return alltoall(np.full((ranks, ranks), payload / ranks))
    return ring_allgather([payload] * ranks)
