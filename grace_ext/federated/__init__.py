"""Federated training: a server that aggregates the updates of sampled clients, with containers in both directions.

Nothing here moves bytes between processes: grace_ext.adapters.mpi, grace_ext.adapters.flower and the simulator do.
"""

from ..means import ClippedMean, Median, NearestNeighborMixing, SenderMean, TrimmedMean, WeightedMean
from .client import Client
from .messages import Rejected
from .pace import Fitted, Pace
from .report import Report
from .server import Server

__all__ = [
    "Client",
    "ClippedMean",
    "Fitted",
    "Median",
    "NearestNeighborMixing",
    "Pace",
    "Rejected",
    "Report",
    "SenderMean",
    "Server",
    "TrimmedMean",
    "WeightedMean",
]
