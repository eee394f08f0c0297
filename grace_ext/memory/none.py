"""No error feedback: what is not sent is lost."""

from ..registry import register
from .base import Memory


@register
class NoMemory(Memory):
    name = "none"
    by_rows = True
