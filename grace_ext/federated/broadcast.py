"""The way down: the containers that tell clients the model, each client from the round that it has."""

import collections
from collections.abc import Mapping

import numpy as np

from .._util.rng import Stream
from ..errors import ConfigError
from ..pipeline.compressor import Compressor, make_compressor
from .estimate import Estimate
from .messages import FRESH

_EXACT = "dense/raw"


class ModelBroadcast:
    """Knows what clients have been told of the model, and keeps the containers of the last rounds.

    Args:
        model: float32[d], the model that all clients start from.
        clients: Number of clients, which are numbered from 0.
        keep: Number of rounds whose containers are kept, at least 1.

    Raises:
        ConfigError: `keep` is below 1.
    """

    def __init__(self, model: np.ndarray, clients: int, keep: int):
        if keep < 1:
            raise ConfigError(f"keep={keep}; allowed: from 1 on")
        #: The model as clients rebuild it from the containers.
        self.told = Estimate(model)
        self._keep = keep
        self._history: collections.OrderedDict[int, np.ndarray] = collections.OrderedDict()  # round -> container
        self._at = dict.fromkeys(range(clients), 0)  # the round that each client's model is of; FRESH: not known

    @property
    def clients(self) -> int:
        """Number of clients."""
        return len(self._at)

    def tell(self, round_: int, model: np.ndarray, compressor: Compressor, stream: Stream) -> int:
        """Make the container of a round.

        Args:
            round_: Number of the round.
            model: float32[d], the model of the round.
            compressor: Compresses the difference from what clients have been told.
            stream: Random numbers for the compressor.

        Returns:
            The number of bytes of the container.

        Raises:
            ExchangeError: The model is not finite. Nothing has changed then.
        """
        blob = self.told.encode_and_apply(model, compressor, stream)
        self._history[round_] = blob
        while len(self._history) > self._keep:
            self._history.popitem(last=False)
        return blob.size

    def take_missed(self, client: int, round_: int) -> tuple[int, list[np.ndarray]]:
        """Collect what a client has missed of the model; the client counts as up to date from then on.

        Args:
            client: Number of the client.
            round_: The current round.

        Returns:
            The round that the containers continue from, and the containers, uint8[m] each. If the client has missed more
            rounds than are kept, or more bytes than the model has, they are FRESH and one container with the whole model.
        """
        at = self._at[client]
        missed = range(at + 1, round_ + 1) if at != FRESH else None
        blobs = None
        if missed is not None and all(number in self._history for number in missed):
            blobs = [self._history[number] for number in missed]
        if blobs is None or len(blobs) > 1 and sum(blob.size for blob in blobs) > self.told.known.nbytes:
            at, blobs = FRESH, [make_compressor(_EXACT).compress(self.told.known)]
        self._at[client] = round_
        return at, blobs

    def set_round(self, client: int, round_: int) -> None:
        """Note which model a client has.

        Args:
            client: Number of the client.
            round_: The round that its model is of; FRESH: it has none.
        """
        self._at[client] = round_

    def state_dict(self) -> dict[str, np.ndarray]:
        """Return what the next round needs.

        Returns:
            Arrays by name, for numpy.savez.
        """
        return {
            "told": self.told.known,
            "at": np.array([self._at[client] for client in range(self.clients)], np.int64),
            "history": np.array(list(self._history), np.int64),
            **{f"blob.{number}": blob for number, blob in self._history.items()},
        }

    def load_state_dict(self, state: Mapping[str, np.ndarray]) -> None:
        """Restore what `state_dict` returned.

        Args:
            state: Arrays by name, at least those of `state_dict`.

        Raises:
            ConfigError: The state is of a model of another size, or of another number of clients.
            KeyError: A part is missing. Nothing has changed then, in either case.
        """
        told, at = Estimate(state["told"]), dict(enumerate(state["at"].tolist()))
        history = collections.OrderedDict((number, state[f"blob.{number}"]) for number in state["history"].tolist())
        if told.known.size != self.told.known.size or len(at) != self.clients:
            raise ConfigError(
                f"the state is of {told.known.size} elements and {len(at)} clients, not of {self.told.known.size} and "
                f"{self.clients}"
            )
        self.told, self._at, self._history = told, at, history
