"""The former import path of the random streams, which stays valid."""

from ._util.rng import Stream

__all__ = ["Stream"]
