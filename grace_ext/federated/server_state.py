"""What a federated server keeps from round to round, and its file."""

import collections
import copy
import os
from collections.abc import Callable, Mapping

import numpy as np

from .._util.files import atomic_write
from ..errors import ConfigError
from ..means import Mean, WeightedMean
from ..outer import OuterOptimizer
from ..pipeline.compressor import Compressor
from .broadcast import ModelBroadcast
from .compression import checked_compressor
from .estimate import Estimate
from .messages import Rejected
from .norm_check import NormCheck
from .outer_step import OuterStep
from .updates import ClientUpdates, Received
from .weights import Weights

DOWN_MEMORY = "ef21"  # of ModelBroadcast
#: What every saved state has.
_SAVED = frozenset("model told round norms unscaled at memory taken received asked gone history reasons counts".split())


class ServerState:
    """The part of a Server that holds its state, saves and loads it.

    Args:
        start: See Server.
        clients: See Server.
        compression: See Server.
        sampled: See Server.
        optimizer: See Server.
        mean: See Server.
        weights: See Server.
        most_samples: See Server.
        memory: See Server.
        norm_limit: See Server.
        staleness: See Server.
        keep: See Server.
        seed: See Server.

    Raises:
        ConfigError: See Server.
    """

    def __init__(
        self,
        start: np.ndarray,
        clients: int,
        compression: str | dict | Compressor = "topk:0.1/rice/qsgd:7",
        *,
        sampled: int | None = None,
        optimizer: "str | OuterOptimizer | Callable | None" = None,
        mean: Mean | None = None,
        weights: str | Mapping[int, float] = "uniform",
        most_samples: float | None = None,
        memory: str = "residual",
        norm_limit: float = 10.0,
        staleness: int = 10,
        keep: int = 16,
        seed: int = 0,
    ):
        sampled = clients if sampled is None else sampled
        if not 1 <= sampled <= clients:
            raise ConfigError(f"sampled={sampled} of clients={clients}; allowed: 1 to all of them")
        self.compressor: Compressor = checked_compressor(compression, DOWN_MEMORY)
        self.model = np.array(start, np.float32).reshape(-1)
        self.round, self.clients, self.sampled = 0, clients, sampled
        self.told_bytes = 0  # of the container that tells this round's model
        #: How many updates were rejected, by reason.
        self.rejections: collections.Counter[str] = collections.Counter()
        self._step, self._seed = OuterStep(optimizer, self.model.size), seed
        self._broadcast = ModelBroadcast(self.model, clients, keep)
        self._norms = NormCheck(norm_limit, clients)
        self._updates = ClientUpdates(
            self.model.size, clients, mean or WeightedMean(), Weights(weights, most_samples, clients), memory, staleness
        )
        self._expected: dict[int, int] = {}  # of clients whose update is expected, the round whose model they were sent
        self._absent: set[int] = set()
        self._chosen: list[int] | None = None  # None: between rounds
        self._received_updates: dict[int, Received] = {}  # since the last round ended
        self._rejected: dict[int, str] = {}
        self._sent = self._received = 0

    @property
    def told(self) -> Estimate:
        """The model as clients rebuild it from the containers."""
        return self._broadcast.told

    @property
    def own_densities(self) -> bool:
        """Whether clients choose their densities: an update with more values may then have a larger norm."""
        return self._norms.own_densities

    @own_densities.setter
    def own_densities(self, value: bool) -> None:
        """Set whether clients choose their densities."""
        self._norms.own_densities = value

    def estimate(self, client: int) -> np.ndarray | None:
        """Return what the server knows of a client's update, with memory "ef21".

        Args:
            client: Number of the client.

        Returns:
            float32[d], not to be changed; None if no update of the client was accepted yet.
        """
        estimate = self._updates.estimates.get(client)
        return None if estimate is None else estimate.known

    def save(self, path: str | os.PathLike) -> None:
        """Save all that the next round needs, between rounds, except the state of an optimizer that is a function.

        Args:
            path: The file; it is replaced as a whole or not at all.

        Raises:
            ConfigError: The round has not ended.
        """
        if self._chosen is not None:
            raise ConfigError(f"round {self.round} has not ended")
        state = {
            "model": self.model,
            "round": self.round,
            "received": self._received,
            "asked": np.array(list(self._expected.items()), np.int64).reshape(-1, 2),
            **{f"came.{client}": one.up.pack() for client, one in self._received_updates.items()},
            "gone": np.array(sorted(self._absent), np.int64),
            "reasons": np.array(list(self.rejections), np.str_),
            "counts": np.array(list(self.rejections.values()), np.int64),
        }
        for part in (self._broadcast, self._norms, self._updates, self._step):
            state |= part.state_dict()
        with atomic_write(path) as new, open(new, "wb") as file:
            np.savez(file, **state)  # type: ignore[arg-type]

    def load(self, path: str | os.PathLike) -> None:
        """Restore what `save` has written.

        Args:
            path: The file.

        Raises:
            ConfigError: The state is that of a model of another size, of another number of clients or of another memory, or a
                part is missing or damaged. The server then stays as it was.
        """
        with np.load(path, allow_pickle=False) as state:
            if missing := _SAVED - set(state.files):
                raise ConfigError(f"{path} lacks {', '.join(sorted(missing))}: not a server's state, or an older one")
            model, at = state["model"], state["at"]
            if model.size != self.model.size or at.size != self.clients:
                raise ConfigError(
                    f"{path} is of {model.size} elements and {at.size} clients, this server has {self.model.size} and "
                    f"{self.clients}"
                )
            round_, received = int(state["round"]), int(state["received"])
            expected, absent = dict(state["asked"].tolist()), set(state["gone"].tolist())
            rejections = collections.Counter(dict(zip(state["reasons"].tolist(), state["counts"].tolist(), strict=True)))
            broadcast, norms = copy.copy(self._broadcast), copy.copy(self._norms)
            updates, step = copy.copy(self._updates), copy.copy(self._step)
            try:
                for part in (broadcast, norms, updates, step):
                    part.load_state_dict(state)  # it replaces what the part has, and changes none of it
                came = [(int(key.removeprefix("came.")), state[key]) for key in state.files if key.startswith("came.")]
                received_updates = {
                    client: updates.examine(client, message, expected[client], round_ + 1) for client, message in came
                }
            except KeyError as error:
                raise ConfigError(f"{path} lacks a part: {error}") from error
            except Rejected as error:
                raise ConfigError(f"{path} holds an update that is not acceptable: {error}") from error
        self.model[:] = model
        self.round, self._received, self._sent, self.told_bytes = round_, received, 0, 0
        self._expected, self._absent, self.rejections = expected, absent, rejections
        self._broadcast, self._norms, self._updates, self._step = broadcast, norms, updates, step
        self._chosen, self._received_updates, self._rejected = None, received_updates, {}
