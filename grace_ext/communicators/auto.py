"""One bucket by the way that is the fastest here and now: compressed, or dense through the library's own allreduce."""

import functools

import numpy as np

from ..compressor import compressor
from ..registry import register
from .allreduce import Allreduce
from .base import Communicator

#: Ways without containers.
DENSE = {"fp16": "dense/fp16", "float32": "dense/raw"}


@register
class Auto(Communicator):
    """What users name. The exchange makes a Switch of it for each bucket, and a Chooser for all of them."""

    name = "auto"
    collectives = ()

    def start(self, *_, **__):
        raise NotImplementedError("the exchange replaces this one by a Switch a bucket")


class Switch(Communicator):
    """A bucket's ways. `way` changes between steps only, on all ranks.

    compressed: the communicator of the containers.
    """

    name = "auto"
    COMPRESSED = "compressed"

    def __init__(self, compressed: Communicator):
        self._compressed, self._allreduce = compressed, Allreduce()
        self._dense = {way: compressor(spec) for way, spec in DENSE.items()}
        #: Names of all ways.
        self.ways = (self.COMPRESSED, *DENSE)
        self.way = self.COMPRESSED
        #: Whether the residual has been sent since the way became a dense one: then nobody has to look at it.
        self.flushed = False

    def payload(self, way: str, size: int) -> int:
        """Bytes of a dense way."""
        return size * np.dtype(self._dense[way].linear).itemsize

    def take(self, way: str) -> None:
        """Between steps."""
        if way != self.way:
            self.way, self.flushed = way, False

    @property
    def _inner(self) -> Communicator:
        return self._compressed if self.way == self.COMPRESSED else self._allreduce

    @property
    def collectives(self):
        return self._inner.collectives

    @property
    def needs_memory(self) -> bool:
        return not self.flushed

    def check(self, compressor):
        self._compressed.check(compressor)

    def start(self, transport, name, compressor, gradient, state, stream, sizes=None):
        inner = functools.partial(self._inner.start, transport, name, self._dense.get(self.way, compressor))
        return inner(gradient, state, stream, sizes)

    def start_empty(self, transport, name, compressor, size, stream, sizes=None):
        return self._inner.start_empty(transport, name, self._dense.get(self.way, compressor), size, stream, sizes)

    def advance(self, pending, transport):
        self._inner.advance(pending, transport)

    def finish(self, pending, transport, out, weight):
        return self._inner.finish(pending, transport, out, weight)

    def end_step(self, finite: bool) -> None:
        self.flushed = self.way != self.COMPRESSED and (self.flushed or finite)
