"""The exchange of one training step: buckets are encoded while backward goes on, sent, decoded and summed."""

from .engine import Exchange

__all__ = ["Exchange"]
