"""The import path that grace_ext.observe.capture had at first. It stays."""

from .observe.capture import STEPS, Capture

__all__ = ["STEPS", "Capture"]
