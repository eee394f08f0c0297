"""Memory `none`."""

from ..registry import register
from .base import Memory


@register
class NoMemory(Memory):
    """No error feedback: what is not sent is lost."""

    name = "none"
    supports_rows = True
    suits_votes = True
    suits_sender_means = True
