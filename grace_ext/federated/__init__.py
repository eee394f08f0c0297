"""Federated training: a server that aggregates what sampled clients send, containers in both directions.

Nothing here moves bytes: grace_ext.adapters.mpi and the simulator do.
"""

from .client import Client
from .messages import Rejected
from .pace import Fitted, Pace
from .server import Report, Server

__all__ = ["Client", "Fitted", "Pace", "Rejected", "Report", "Server"]
