"""Communicators, one file each. A new one is its file and a line here."""

from . import allgather, allreduce, auto, hierarchical, sharded, tree  # noqa: F401  (importing registers them)
from .base import Communicator, Transport
from .inprocess import InProcessGroup

__all__ = ["Communicator", "InProcessGroup", "Transport"]
