"""Federated training: a server that aggregates the updates of sampled clients, with containers in both directions.

Nothing here moves bytes between processes: grace_ext.adapters.mpi, grace_ext.adapters.flower and the simulator do.
"""

from .client import Client
from .clipped_mean import ClippedMean
from .mean import WeightedMean
from .median import Median
from .messages import Rejected
from .nearest_neighbor_mixing import NearestNeighborMixing
from .pace import Fitted, Pace
from .report import Report
from .server import Server
from .trimmed_mean import TrimmedMean

__all__ = [
    "Client",
    "ClippedMean",
    "Fitted",
    "Median",
    "NearestNeighborMixing",
    "Pace",
    "Rejected",
    "Report",
    "Server",
    "TrimmedMean",
    "WeightedMean",
]
