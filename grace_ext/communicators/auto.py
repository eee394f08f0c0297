"""One bucket by the strategy that is the fastest here and now: compressed, or dense through the library's own allreduce."""

import numpy as np

from ..errors import ConfigError
from ..pipeline.compressor import make_compressor
from ..registry import register
from ..transport.base import Transport
from .allgather import Allgather
from .allreduce import Allreduce
from .base import Communicator
from .hierarchical import Hierarchical
from .sharded import Sharded

#: Strategies without containers, the more exact first.
DENSE = {"float32": "dense/raw", "fp16": "dense/fp16"}
_FEWEST_RANKS = {"sharded": 3, "hierarchical": 3}  # from which on a strategy can save anything


@register
class Auto(Communicator):
    """Measures in the first steps which strategy is the fastest for each bucket, and looks again later: containers by
    allgather, sharded or hierarchical, or dense float16 or float32 by the library's own allreduce, as without us. See
    grace_ext.policy.auto_tuner."""

    name = "auto"
    collectives = ()

    def for_bucket(self, compressor, memory, transport, factors):
        if transport.between_steps() is None:
            raise ConfigError(
                "communicator 'auto' has to measure the link between steps, and cannot do it here: use "
                "allgather, sharded or allreduce"
            )
        if memory.has_hooks:
            raise ConfigError(
                f"communicator 'auto' sends some steps dense, of which memory {memory.name!r} knows nothing: "
                f"use residual or none"
            )
        if factors:
            return SwitchingCommunicator({"factors": factors})
        return SwitchingCommunicator.of(compressor, transport.size)

    def start(self, *_, **__):
        raise ConfigError(
            "the communicator 'auto' decides between steps and so works inside an Exchange only; to exchange "
            "by hand, use allgather, sharded, hierarchical or allreduce"
        )


class SwitchingCommunicator(Communicator):
    """A bucket's strategies. `strategy` changes between steps only, on all ranks."""

    name = "auto"
    switches = True

    def __init__(self, compressed: dict[str, Communicator]):
        """compressed: the strategies with compression, by name; the first is where it begins."""
        self._compressed, self._allreduce = compressed, Allreduce()
        self._dense = {strategy: make_compressor(spec) for strategy, spec in DENSE.items()}
        #: Names of all.
        self.strategies = (*compressed, *DENSE)
        self.strategy = self.strategies[0]
        #: Whether the residual has been sent since the strategy became a dense one: then nobody has to look at it.
        self.flushed = False

    @classmethod
    def of(cls, compressor, ranks: int) -> "SwitchingCommunicator":
        """With all strategies that can carry what the compressor makes."""
        found: dict[str, Communicator] = {}
        for kind in (Allreduce, Allgather, Sharded, Hierarchical):
            if ranks >= _FEWEST_RANKS.get(kind.name, 1) and can_carry(kind(), compressor):
                found[kind.name] = kind()
        return cls(found)

    @property
    def is_dense(self) -> bool:
        return self.strategy in DENSE

    @property
    def bypass_dtype(self):
        return self.strategy if self.flushed else None

    def strategies_over(self, transport: Transport) -> list[str]:
        """Those that differ from others, now that the hosts are known."""
        levels = max(transport.hosts) + 1 not in (1, transport.size)
        return [strategy for strategy in self.strategies if strategy != "hierarchical" or levels]

    def check(self, compressor):
        """All strategies were asked."""

    def payload(self, strategy: str, size: int) -> int:
        """Bytes of a dense one."""
        return size * np.dtype(self._dense[strategy].reducible_dtype).itemsize

    def switch_to(self, strategy: str) -> None:
        """Between steps."""
        if strategy != self.strategy:
            self.flushed = self.flushed and strategy in DENSE
            self.strategy = strategy

    @property
    def _inner(self) -> Communicator:
        return self._allreduce if self.is_dense else self._compressed[self.strategy]

    @property
    def sends_containers(self):
        return self._inner.sends_containers

    @property
    def tells_support(self):
        return self._inner.tells_support

    @property
    def preserves_input(self):
        return self._inner.preserves_input

    @property
    def needs_memory(self) -> bool:
        return not self.flushed

    def collectives_of(self, transport):
        return self._inner.collectives_of(transport)

    def most_collectives(self, transport: Transport) -> int:
        """Of any strategy."""
        return max(len(one.collectives_of(transport)) for one in (*self._compressed.values(), self._allreduce))

    def start(self, transport, name, compressor, gradient, state, stream, sizes=None):
        return self._inner.start(transport, name, self._dense.get(self.strategy, compressor), gradient, state, stream, sizes)

    def start_empty(self, transport, name, compressor, size, stream, sizes=None):
        return self._inner.start_empty(transport, name, self._dense.get(self.strategy, compressor), size, stream, sizes)

    def advance(self, pending, transport):
        self._inner.advance(pending, transport)

    def finish(self, pending, transport, out, weight):
        return self._inner.finish(pending, transport, out, weight)

    def end_step(self, finite: bool) -> None:
        self.flushed = self.is_dense and (self.flushed or finite)


def can_carry(communicator: Communicator, compressor) -> bool:
    try:
        communicator.check(compressor)
    except ConfigError:
        return False
    return True
