"""Communicator `allgather`."""

import time
from typing import Any

import numpy as np

from .._util.rng import Stream
from ..pipeline import container
from ..pipeline.compressor import Compressor
from ..pipeline.parts_decoder import decode_sum_to_parts
from ..registry import register
from ..transport.base import Transport
from .base import Communicator, Pending, wait
from .places import HOST, Placed


@register
class Allgather(Placed, Communicator[Pending]):
    """Every rank sends its container to every other one. Works with every compressor.

    A bucket takes one collective: containers tell their own length, so the joined bytes need no table of sizes.
    """

    name = "allgather"
    sends_containers = True
    preserves_input = True
    decodes_later = True

    @property
    def writes_parts(self) -> bool:  # type: ignore[override]
        """Where gradients lie on the host."""
        return self.place is HOST

    def takes_parts(self, compressor: Compressor) -> bool:
        return compressor.takes_parts

    def start(
        self,
        transport: Transport,
        name: str,
        compressor: Compressor,
        gradient: Any,
        state: tuple | None,
        stream: Stream,
        sizes: tuple[int, ...] | None = None,
    ) -> Pending:
        encoded = self.place.encode(compressor, gradient, stream, state=state, sizes=sizes)
        return Pending(
            transport.allgather(name, encoded.blob),
            encoded.blob.size,
            encoded.seconds,
            index_codecs=[encoded.index_codec] if encoded.index_codec else [],
            container=encoded.blob,
            support=encoded.support,
        )

    def start_empty(
        self,
        transport: Transport,
        name: str,
        compressor: Compressor,
        size: int,
        stream: Stream,
        sizes: tuple[int, ...] | None = None,
    ) -> Pending:
        return Pending(transport.allgather(name, np.empty(0, np.uint8)), 0, {})

    def finish(self, pending: Pending, transport: Transport, out: Any, weight: float) -> bool:
        finite = self.receive(pending, transport, sum(map(len, out)) if isinstance(out, list) else len(out))
        self.decode(pending, out, weight)
        return finite

    def receive(self, pending: Pending, transport: Transport, size: int) -> bool:
        joined = wait(pending)
        pending.received = joined.size
        started = time.perf_counter()
        pending.containers = container.split(joined, transport.size, size)
        pending.add_seconds({"decode": time.perf_counter() - started})
        return not any(one.non_finite for one in pending.containers)

    def decode(self, pending: Pending, out: Any, weight: float) -> None:
        started = time.perf_counter()
        containers, pending.containers = pending.containers, []  # not kept until the step ends
        if isinstance(out, list):
            decode_sum_to_parts(containers, out, weight)
        else:
            self.place.decode_sum(containers, out, weight, pending.squares)
        pending.add_seconds({"decode": time.perf_counter() - started})
