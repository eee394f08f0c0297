"""Communicator `auto`."""

from typing import Any, NoReturn

import numpy as np

from ..errors import ConfigError
from ..pipeline.compressor import Compressor, make_compressor
from ..registry import register
from ..transport.base import Transport
from ._alternating import Alternating
from .allgather import Allgather
from .allreduce import Allreduce
from .base import BucketMemory, Communicator
from .hierarchical import Hierarchical
from .places import Place, placed
from .sharded import Sharded

#: Strategies without containers, the more exact first.
DENSE = {"float32": "dense/raw", "fp16": "dense/fp16"}
#: Strategies beside which small float32 goes by allgather, too.
WITH_FLOAT32 = frozenset((Allgather.name, Sharded.name))
_FEWEST_RANKS = {"sharded": 3, "hierarchical": 3}  # the number of ranks from which on a strategy can save anything


@register
class Auto(Communicator):
    """Exchanges each bucket by the strategy that is fastest here and now: compressed, or dense as without grace_ext.

    The first steps measure which strategy is the fastest for each bucket, and the choice is reviewed later. Strategies with
    compression send containers by allgather, sharded or hierarchical; dense ones send float16 or float32 by the library's
    own allreduce, as without grace_ext. See grace_ext.policy.auto_tuner.
    """

    name = "auto"
    collectives = ()

    def for_bucket(
        self, compressor: Compressor, memory: BucketMemory, transport: Transport, factors: Communicator | None
    ) -> "SwitchingCommunicator":
        if transport.probe_transport() is None:
            raise ConfigError(
                "communicator 'auto' has to measure the link between steps, and cannot do it here: use "
                "allgather, sharded or allreduce"
            )
        if memory.has_hooks and not memory.hooks_work_dense:
            raise ConfigError(
                f"communicator 'auto' sends some steps dense, of which memory {memory.name!r} knows nothing: "
                f"use residual, momentum, adam, muon or none"
            )
        if factors:
            return SwitchingCommunicator({"factors": factors})
        return SwitchingCommunicator.for_compressor(compressor, transport.size)

    def start(self, *_: Any, **__: Any) -> NoReturn:
        raise ConfigError(
            "the communicator 'auto' decides between steps and so works inside an Exchange only; to exchange "
            "by hand, use allgather, sharded, hierarchical or allreduce"
        )


class SwitchingCommunicator(Alternating):
    """Exchanges one bucket by one of several strategies. The strategy changes only between steps, on all ranks.

    Args:
        compressed: The strategies with compression by name; the first one is used at the beginning.
    """

    name = "auto"
    is_tuned = True

    def __init__(self, compressed: dict[str, Communicator]):
        self._compressed, self._allreduce = compressed, Allreduce()
        self._dense = {strategy: make_compressor(spec) for strategy, spec in DENSE.items()}
        #: The names of all strategies.
        self.strategies = (*compressed, *DENSE)
        self.strategy = self.strategies[0]
        #: Whether the residual has been sent since the strategy became a dense one, so that it is zero.
        self.flushed = False

    @classmethod
    def for_compressor(cls, compressor: Compressor, ranks: int) -> "SwitchingCommunicator":
        """Make one with all strategies that can carry what a compressor makes.

        Args:
            compressor: The bucket's compressor.
            ranks: Number of ranks.

        Returns:
            The communicator.
        """
        found: dict[str, Communicator] = {}
        for kind in (Allreduce, Allgather, Sharded, Hierarchical):
            if ranks >= _FEWEST_RANKS.get(kind.name, 1) and can_carry(kind(), compressor):
                found[kind.name] = kind()
        return cls(found)

    def _place(self, place: Place) -> None:
        self._allreduce = self._allreduce.at(place)
        self._compressed = {name: placed(one, place) for name, one in self._compressed.items()}

    @property
    def sends_whole(self) -> bool:  # type: ignore[override]
        """Whether the strategy is a dense one."""
        return self.strategy in DENSE

    @property
    def bypass_dtype(self) -> str | None:  # type: ignore[override]
        """The dtype of the strategy if gradients may bypass the exchange now: "float32" or "fp16", else None."""
        return self.strategy if self.flushed else None

    def available_strategies(self, transport: Transport) -> list[str]:
        """Return the strategies that differ from each other, now that the hosts are known.

        Args:
            transport: The transport of the exchange.

        Returns:
            Their names.
        """
        levels = max(transport.hosts) + 1 not in (1, transport.size)
        return [strategy for strategy in self.strategies if strategy != "hierarchical" or levels]

    def check(self, compressor: Compressor) -> None:
        """Check nothing: every strategy was checked when it was chosen."""

    def payload_bytes(self, strategy: str, size: int) -> int:
        """Return how many bytes a rank gives to the collective of a dense strategy.

        Args:
            strategy: Name of a dense strategy.
            size: Number of elements of the bucket.

        Returns:
            The number of bytes.
        """
        return size * np.dtype(self._dense[strategy].reducible_dtype).itemsize

    def switch_to(self, strategy: str) -> None:
        """Switch to another strategy, between steps and on all ranks.

        Args:
            strategy: Its name.
        """
        if strategy != self.strategy:
            self.flushed = self.flushed and strategy in DENSE
            self.strategy = strategy

    @property
    def _inner(self) -> Communicator:
        return self._allreduce if self.sends_whole else self._compressed[self.strategy]

    def _all(self) -> list[Communicator]:
        return [*self._compressed.values(), self._allreduce]

    def _compressor(self, compressor: Compressor) -> Compressor:
        return self._dense.get(self.strategy, compressor)

    @property
    def needs_memory(self) -> bool:  # type: ignore[override]
        """Whether a residual may be left that has not been sent."""
        return not self.flushed

    def memory_replaced(self) -> None:
        self.flushed = False

    def end_step(self, finite: bool) -> None:
        """Note that a step has ended.

        Args:
            finite: Whether every rank's gradient was finite, so that the step counts.
        """
        self.flushed = self.sends_whole and (self.flushed or finite)


class Accompanying(Alternating):
    """Sends small float32 by allgather while other buckets send containers, which spares collectives; else by allreduce."""

    name = Auto.name
    switches = False

    def __init__(self) -> None:
        self._allgather, self._allreduce = Allgather(), Allreduce()
        #: Whether other buckets send containers. It changes only between steps, on all ranks.
        self.has_company = False

    def _place(self, place: Place) -> None:
        self._allgather, self._allreduce = self._allgather.at(place), self._allreduce.at(place)

    @property
    def _inner(self) -> Communicator:
        return self._allgather if self.has_company else self._allreduce

    def _all(self) -> list[Communicator]:
        return [self._allgather, self._allreduce]

    def _compressor(self, compressor: Compressor) -> Compressor:
        return compressor

    def check(self, compressor: Compressor) -> None:
        """Check nothing: both carry float32."""


def can_carry(communicator: Communicator, compressor: Compressor) -> bool:
    """Return whether a communicator can carry what a compressor makes.

    Args:
        communicator: The communicator.
        compressor: The compressor.

    Returns:
        False if its check raises ConfigError.
    """
    try:
        communicator.check(compressor)
    except ConfigError:
        return False
    return True
