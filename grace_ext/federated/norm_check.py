"""The check that no update is much larger than those of the other clients."""

import collections
import math
import statistics
from collections.abc import Iterable, Mapping

import numpy as np

from ..errors import ConfigError

_FEWEST = 3  # the fewest norms whose median is meaningful
_KEPT = 32  # norms of the last updates
Norms = dict[int, tuple[int, float]]  # client -> number of values of its update, and its norm


class NormCheck:
    """Compares the norms of a round's updates with the median norm of the last updates.

    The median is that of the norms above 0, so that clients which send zeros do not switch the check off. Where all but a few
    of the known norms are 0, nothing can be compared, and only zeros are accepted until enough different clients have sent
    something else for a median. A norm that is too large is not part of the median that the others are compared with.

    Args:
        limit: How many times the median norm an update may have, above 1; math.inf: no limit.
        clients: Number of clients.

    Raises:
        ConfigError: The limit is not above 1.
    """

    def __init__(self, limit: float, clients: int):
        if not limit > 1:
            raise ConfigError(f"norm_limit={limit}; allowed: above 1")
        self._limit, self._clients = limit, clients
        #: Whether clients choose their densities. An update with m times the values of another may then have sqrt(m) times
        #: its norm, which is the most that additional smaller values contribute.
        self.own_densities = False
        self._norms: collections.deque[tuple[int, float]] = collections.deque(maxlen=_KEPT)  # number of values, norm
        #: The norms above 0 that could not be compared with anything.
        self.uncompared: Norms = {}

    def remember(self, accepted: Iterable[tuple[int, float]], uncompared: Norms) -> None:
        """Remember what `too_large` found in a round.

        Args:
            accepted: For each update that was accepted, the number of its values and its L2 norm.
            uncompared: The second result of `too_large`.
        """
        self._norms.extend(accepted)
        self.uncompared = uncompared

    def too_large(self, updates: Norms) -> tuple[dict[int, str], Norms]:
        """Find the updates of a round whose norm is larger than allowed. Nothing changes until `remember`.

        Args:
            updates: For each client, the number of values and the norm of its update.

        Returns:
            For each client whose update is too large, the reason as text; and the norms above 0 that still could not be
            compared with anything.
        """
        if math.isinf(self._limit):
            return {}, self.uncompared
        before = [one for client, one in self.uncompared.items() if client not in updates]
        uncompared = self.uncompared | {client: one for client, one in updates.items() if one[1] > 0}
        refused: dict[int, str] = {}
        while True:
            left = {client: one for client, one in updates.items() if client not in refused}
            seen = [*self._norms, *left.values(), *before]
            above = [(k, norm) for k, norm in seen if norm > 0]
            if len(seen) >= _FEWEST and len(above) < min(_FEWEST, self._clients):
                nothing = "where nearly all others are 0: there is nothing to compare it with"
                refused |= {client: f"{norm:.4g}, {nothing}" for client, (_, norm) in left.items() if norm > 0}
                return refused, uncompared
            further = self._beyond(left, above) if len(seen) >= _FEWEST else {}
            if not further:
                return refused, {}
            refused |= further

    def _beyond(self, updates: Norms, norms: list[tuple[int, float]]) -> dict[int, str]:
        """Find the updates that are too large for the median of these norms, and say why."""
        most = {client: self._limit * self._median(k, norms) for client, (k, _) in updates.items()}
        return {
            client: f"{norm:.4g}, where at most {most[client]:.4g} is allowed"
            for client, (_, norm) in updates.items()
            if norm > most[client]
        }

    def _median(self, k: int, norms: list[tuple[int, float]]) -> float:
        """Compute the median norm, scaled so that it can be compared with that of an update of k values."""
        return statistics.median(
            norm * math.sqrt(max(1.0, k / max(count, 1))) if self.own_densities else norm for count, norm in norms
        )

    def state_dict(self) -> dict[str, np.ndarray]:
        """Return what the next round needs.

        Returns:
            Arrays by name, for numpy.savez.
        """
        return {
            "norms": np.array(self._norms).reshape(-1, 2),
            "unscaled": np.array([(client, *one) for client, one in self.uncompared.items()]).reshape(-1, 3),
        }

    def load_state_dict(self, state: Mapping[str, np.ndarray]) -> None:
        """Restore what `state_dict` returned.

        Args:
            state: Arrays by name, at least those of `state_dict`.

        Raises:
            KeyError: A part is missing. Nothing has changed then.
        """
        norms = collections.deque([(int(k), norm) for k, norm in state["norms"].tolist()], maxlen=_KEPT)
        uncompared = {int(client): (int(k), norm) for client, k, norm in state["unscaled"].tolist()}
        self._norms, self.uncompared = norms, uncompared
