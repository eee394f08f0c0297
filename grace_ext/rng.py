"""The import path that the random streams had at first. It stays."""

from ._util.rng import Stream

__all__ = ["Stream"]
