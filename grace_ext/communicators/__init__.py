"""Communicators, one file each. A new one takes a file and a line here."""

from ..transport import InProcessGroup, Transport
from . import allgather, allreduce, auto, hierarchical, majority, senders, sharded, tree  # noqa: F401  (importing registers them)
from .base import Communicator

__all__ = ["Communicator", "InProcessGroup", "Transport"]
