"""Policies: what is decided per tensor or per step."""

from .memories import DEFAULT_MEMORY, Memories
from .rules import DEFAULT_ROWS_SPEC, DEFAULT_SPEC, Rules
from .schedules import Schedule, Schedules

__all__ = ["DEFAULT_MEMORY", "DEFAULT_ROWS_SPEC", "DEFAULT_SPEC", "Memories", "Rules", "Schedule", "Schedules"]
