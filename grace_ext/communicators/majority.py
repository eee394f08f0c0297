"""Communicator `majority`."""

from typing import Any

from .._util.rng import Stream
from ..errors import ConfigError
from ..pipeline.compressor import Compressor
from ..registry import register
from ..transport.base import Transport
from .sharded import Sharded


@register
class Majority(Sharded):
    """Majority vote on signs: each element of the mean over ranks is 1 or -1, whichever more ranks have sent.

    Each rank owns a slice of the bucket, counts the votes on it, and sends the outcome to all: one bit for each element in both
    directions, however many ranks there are. A tie counts as 1, as a zero does, which is GRACE's rule. It needs the spec
    `dense/sign:one` and memory `none` or `signum`. A rank that has joined the others has no vote.

    Source:
        Bernstein, Zhao, Azizzadenesheli and Anandkumar, signSGD with majority vote is communication efficient and fault
        tolerant, ICLR 2019, Algorithm 1, with a server for every slice in the place of one.
    """

    name = "majority"
    votes = True

    def check(self, compressor: Compressor) -> None:
        super().check(compressor)
        if not compressor.dense or str(compressor.value) != "sign:one":
            raise ConfigError(f"communicator 'majority' puts signs to the vote: use dense/sign:one, not {str(compressor)!r}")

    def start(
        self,
        transport: Transport,
        name: str,
        compressor: Compressor,
        gradient: Any,
        state: tuple | None,
        stream: Stream,
        sizes: tuple[int, ...] | None = None,
    ) -> Any:
        return super().start(transport, name, compressor, self.place.votes_of(gradient), None, stream, sizes)

    def start_empty(
        self,
        transport: Transport,
        name: str,
        compressor: Compressor,
        size: int,
        stream: Stream,
        sizes: tuple[int, ...] | None = None,
    ) -> Any:
        pending = super().start_empty(transport, name, compressor, size, stream, sizes)
        pending.compressor = compressor  # for the outcome on its own slice
        return pending

    def finish(self, pending: Any, transport: Transport, out: Any, weight: float) -> bool:
        return super().finish(pending, transport, out, weight * transport.size)
