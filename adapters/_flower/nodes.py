"""Which client of grace_ext.federated a node of Flower is, and what is known of its model."""

import logging
from collections.abc import Iterable, Mapping

from grace_ext import ConfigError

_LOG = logging.getLogger("grace_ext")


class Nodes:
    """Numbers the nodes as they appear.

    Args:
        most: How many nodes may take part in a training, those that have left included.
        weights: For each node that may take part its weight; None: any node may.
        begins_with: The round that a node's model is of at first; None: it has none.

    Raises:
        ConfigError: `most` is below 1.
    """

    def __init__(self, most: int, weights: Mapping[int, float] | None, begins_with: int | None):
        if most < 1:
            raise ConfigError(f"most_nodes={most}; allowed: from 1 on")
        self._numbers = {node: number for number, node in enumerate(weights or ())}
        self._listed, self._begins_with = weights is not None, begins_with
        #: The number of clients.
        self.most = len(self._numbers) if self._listed else most
        #: By client, the last round whose model it has shown to have; None: it needs the whole model.
        self.rounds: dict[int, int | None] = dict.fromkeys(self._numbers.values(), begins_with)
        #: The clients that have answered once, so that they know the layout of the model.
        self.answered: set[int] = set()

    def number(self, node: int) -> int | None:
        """Give a node's number.

        Args:
            node: Its ID.

        Returns:
            The number, from 0 on; None if the node may not take part.
        """
        if node not in self._numbers:
            if self._listed or len(self._numbers) >= self.most:
                reason = "it has no weight" if self._listed else f"most_nodes={self.most} have taken part already"
                _LOG.warning("federated: node %d is not asked: %s", node, reason)
                return None
            self._numbers[node] = len(self._numbers)
            self.rounds[self._numbers[node]] = self._begins_with
        return self._numbers[node]

    def known(self, nodes: Iterable[int]) -> set[int]:
        """Choose the clients that have a number already.

        Args:
            nodes: IDs of nodes.

        Returns:
            The numbers of those that have one.
        """
        return {self._numbers[node] for node in nodes if node in self._numbers}

    @property
    def all(self) -> set[int]:
        """The numbers of all nodes that have one."""
        return set(self._numbers.values())
