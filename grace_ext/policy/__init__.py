"""Policies: what is decided for each tensor or for each step."""

from .advisor import advise
from .allocation import ErrorCurve, least_bytes, least_error
from .bandwidth import BandwidthMonitor
from .defaults import Default, default_for
from .guarded import Guarded
from .kimad import Kimad, KimadPlus
from .lgreco import LGreCo
from .memories import DEFAULT_MEMORY, Memories
from .rules import DEFAULT_ROWS_SPEC, DEFAULT_SPEC, Rules
from .schedules import Schedule, Schedules

__all__ = [
    "BandwidthMonitor",
    "DEFAULT_MEMORY",
    "DEFAULT_ROWS_SPEC",
    "DEFAULT_SPEC",
    "Default",
    "ErrorCurve",
    "Guarded",
    "Kimad",
    "KimadPlus",
    "LGreCo",
    "Memories",
    "Rules",
    "Schedule",
    "Schedules",
    "advise",
    "default_for",
    "least_bytes",
    "least_error",
]
