"""One bucket by the way that is the fastest here and now: compressed, or dense through the library's own allreduce."""

import numpy as np

from ..errors import ConfigError
from ..pipeline.compressor import compressor as compressor_of
from ..registry import register
from ..transport.base import Transport
from .allgather import Allgather
from .allreduce import Allreduce
from .base import Communicator, Pending, wait
from .hierarchical import Hierarchical
from .sharded import Sharded

#: Ways without containers, the more exact first.
DENSE = {"float32": "dense/raw", "fp16": "dense/fp16"}
_FEWEST = {"sharded": 3, "hierarchical": 3}  # ranks from which on a way can save anything


@register
class Auto(Communicator):
    """Measures in the first steps which way is the fastest for each bucket, and looks again later: containers by allgather,
    sharded or hierarchical, or dense float16 or float32 by the library's own allreduce, as without us. See policy.choice."""

    # The exchange makes a Switch of it for each bucket, and a Chooser for all of them.
    name = "auto"
    collectives = ()

    def start(self, *_, **__):
        raise ConfigError("the communicator 'auto' chooses between steps and so works inside an Exchange only, which gives "
                          "each bucket a Switch; to exchange by hand, use allgather, sharded, hierarchical or allreduce")


class Switch(Communicator):
    """A bucket's ways. `way` changes between steps only, on all ranks."""

    name = "auto"
    chooses = True

    def __init__(self, ways: dict[str, Communicator]):
        """ways: those of containers, by name; the first is where it begins."""
        self._compressed, self._allreduce = ways, Allreduce()
        self._dense = {way: compressor_of(spec) for way, spec in DENSE.items()}
        #: Names of all ways.
        self.ways = (*ways, *DENSE)
        self.way = self.ways[0]
        #: Whether the residual has been sent since the way became a dense one: then nobody has to look at it.
        self.flushed = False

    @classmethod
    def of(cls, compressor, ranks: int) -> "Switch":
        """With all ways that can carry what the compressor makes."""
        ways: dict[str, Communicator] = {}
        for kind in (Allreduce, Allgather, Sharded, Hierarchical):
            if ranks >= _FEWEST.get(kind.name, 1) and can_carry(kind(), compressor):
                ways[kind.name] = kind()
        return cls(ways)

    @property
    def is_dense(self) -> bool:
        return self.way in DENSE

    def ways_over(self, transport: Transport) -> list[str]:
        """Those that differ from others, now that the hosts are known."""
        levels = max(transport.hosts) + 1 not in (1, transport.size)
        return [way for way in self.ways if way != "hierarchical" or levels]

    def check(self, compressor):
        """All ways were asked."""

    def payload(self, way: str, size: int) -> int:
        """Bytes of a dense way."""
        return size * np.dtype(self._dense[way].linear).itemsize

    def take(self, way: str) -> None:
        """Between steps."""
        if way != self.way:
            self.flushed = self.flushed and way in DENSE
            self.way = way

    @property
    def _inner(self) -> Communicator:
        return self._allreduce if self.is_dense else self._compressed[self.way]

    @property
    def sends_containers(self):
        return self._inner.sends_containers

    @property
    def tells_support(self):
        return self._inner.tells_support

    @property
    def only_reads(self):
        return self._inner.only_reads

    @property
    def needs_memory(self) -> bool:
        return not self.flushed

    def collectives_of(self, transport):
        return self._inner.collectives_of(transport)

    def most_collectives(self, transport: Transport) -> int:
        """Of any way."""
        return max(len(way.collectives_of(transport)) for way in (*self._compressed.values(), self._allreduce))

    def start(self, transport, name, compressor, gradient, state, stream, sizes=None):
        return self._inner.start(transport, name, self._dense.get(self.way, compressor), gradient, state, stream, sizes)

    def start_empty(self, transport, name, compressor, size, stream, sizes=None):
        return self._inner.start_empty(transport, name, self._dense.get(self.way, compressor), size, stream, sizes)

    def advance(self, pending, transport):
        self._inner.advance(pending, transport)

    def finish(self, pending, transport, out, weight):
        if isinstance(pending, Passed):
            wait(pending)
            return True
        return self._inner.finish(pending, transport, out, weight)

    def end_step(self, finite: bool) -> None:
        self.flushed = self.is_dense and (self.flushed or finite)


class Passed(Pending):
    """Of a bucket whose tensors the adapter gave to its library as they were. The handle's `wait` puts the results where
    the adapter wants them."""


def can_carry(communicator: Communicator, compressor) -> bool:
    try:
        communicator.check(compressor)
    except ConfigError:
        return False
    return True
