"""Policies: what is decided per tensor or per step."""

from .rules import DEFAULT_ROWS_SPEC, DEFAULT_SPEC, Rules

__all__ = ["DEFAULT_ROWS_SPEC", "DEFAULT_SPEC", "Rules"]
