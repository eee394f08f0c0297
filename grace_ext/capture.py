"""The former import path of grace_ext.observe.capture, which stays valid."""

from .observe.capture import STEPS, Capture

__all__ = ["STEPS", "Capture"]
