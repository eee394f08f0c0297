"""Policies: what is decided per tensor or per step."""

from .rules import DEFAULT_SPEC, Rules

__all__ = ["DEFAULT_SPEC", "Rules"]
