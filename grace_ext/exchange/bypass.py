"""Buckets that bypass the exchange: their gradients go through the library's own allreduce, as without grace_ext."""

from ..communicators.base import Pending


class BypassPending(Pending):
    """The exchange of a bucket whose gradients the adapter gave to its library as they were.

    The handle's `wait` puts the results where the adapter wants them.
    """

    bypasses = True
