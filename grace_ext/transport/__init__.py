"""How bytes get to other ranks: what communicators need of MPI, Gloo and NCCL, and wrappers around it."""

from .base import CollectiveHandle, Transport, TransportWrapper
from .inprocess import InProcessGroup

__all__ = ["CollectiveHandle", "InProcessGroup", "Transport", "TransportWrapper"]
