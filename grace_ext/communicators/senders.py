"""Communicator `senders`."""

import time

import numpy as np

from ..pipeline.decoder import decode_sender_mean
from ..registry import register
from ..transport.base import Transport
from .allgather import Allgather
from .base import Pending


@register
class Senders(Allgather):
    """As `allgather`, but the mean of an element is over the ranks that have sent it, and not over all ranks.

    With a sparsifier, few ranks send the same element, and the mean over all ranks makes those small that only one has sent.
    Here they keep their size: an element that one of n ranks has sent is n times as large as by `allgather`. So the learning
    rate has to be lower than there, by up to a factor of n. With a transform, the elements are its coefficients.

    A sum is n times that mean. A rank counts as a sender of all elements if its container is dense, and of none if it has
    joined the others. Where all ranks send the same elements, the result is that of `allgather`. It needs memory `none`, or
    one that keeps a residual of what is sent: `residual`, `momentum`, `dgc` or `demo`.

    Source:
        Peng, Quesnelle and Kingma, DeMo: Decoupled momentum optimization, arXiv 2411.19870: its code has the mean of the
        coefficients over the ranks that sent them.
    """

    name = "senders"
    divides_by_senders = True
    writes_parts = False
    _ranks = 1  # of the exchange, once something has come

    def receive(self, pending: Pending, transport: Transport, size: int) -> bool:
        self._ranks = transport.size
        return super().receive(pending, transport, size)

    def decode(self, pending: Pending, out: np.ndarray, weight: float) -> None:
        started = time.perf_counter()
        containers, pending.containers = pending.containers, []  # not kept until the step ends
        decode_sender_mean(containers, out, weight * self._ranks)
        pending.add_seconds({"decode": time.perf_counter() - started})
