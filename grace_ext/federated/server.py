"""The federated server: FedAvg with containers in both directions, for one vector of parameters.

FedAvg: McMahan et al., Communication-efficient learning of deep networks from decentralized data, AISTATS 2017. With
compression and error feedback in both directions: Algorithm 2 of DeepReduce (Xu, Kostopoulou, Dutta et al., NeurIPS 2021,
appendix). With memory "ef21" it is the parameter server of Kimad (Xin et al., DistributedML 2023, Algorithm 3).
"""

from collections.abc import Iterable

import numpy as np

from .._util.rng import Stream
from ..errors import ConfigError
from ..means.base import l2_norm
from ..pipeline.compressor import Compressor
from .compression import checked_compressor
from .messages import FRESH, Down, Rejected, as_message
from .report import Report
from .server_state import DOWN_MEMORY, ServerState
from .updates import Received


class Server(ServerState):
    """Holds the model, and what clients know of it.

    Args:
        start: float32[d], the initial model, the same as on all clients.
        clients: Number of clients, which are numbered from 0.
        compression: Spec, Compressor or other argument of grace_ext.compressor, for the way down; neither low-rank nor
            unbiased.
        sampled: Number of clients that take part in a round; None: all.
        optimizer: An outer optimizer (grace_ext.outer) or its spec: "sgd", which is FedAvg and the default, "adam:lr=0.01",
            "yogi", …. Or a function of (model, change), float32[d] each, that changes the model in place by `change`, the mean
            of the updates.
        mean: A WeightedMean (the default), SenderMean, ClippedMean, Median, TrimmedMean or NearestNeighborMixing. The last three need
            uniform weights, and dense updates or memory "ef21"; they reject a sparse update.
        weights: How much each client counts in a WeightedMean, SenderMean or ClippedMean; see Weights.
        most_samples: The most samples of a client that count, with weights "samples"; see Weights.
        memory: The memory of the clients: "residual", "ef21" or "none".
        norm_limit: How many times the median norm of the last updates that were not 0 an update may have, above 1; math.inf:
            every norm up to 2**100 is accepted.
        staleness: By how many rounds an update may be late. A late update counts in the round in which it arrives, as much
            as the others. With 0 it is rejected, and so is each update of a client that is always slower than a round.
        keep: Number of rounds whose containers are kept for clients that have missed them. A client that has missed more
            rounds, or more bytes than the model has, gets the whole model.
        seed: Seed of the sampling and of the compressor's random numbers.

    Raises:
        ConfigError: An argument is out of range, the mean does not work with the weights, or the compression cannot be
            used for the way down.
    """

    # Who takes part

    def leave(self, client: int) -> None:
        """Stop asking a client.

        Args:
            client: Number of the client.
        """
        self._absent.add(client)
        self._expected.pop(client, None)

    def join(self, client: int, round_: int | None = None) -> None:
        """Let a client take part, again or for the first time.

        Args:
            client: Number of the client.
            round_: The round that its model is of; None: it has no model, and gets the whole one.
        """
        self._absent.discard(client)
        self._expected.pop(client, None)
        self._broadcast.set_round(client, FRESH if round_ is None or not 0 <= round_ <= self.round else round_)

    @property
    def present(self) -> list[int]:
        """The clients that take part, in ascending order."""
        return [client for client in range(self.clients) if client not in self._absent]

    # A round, in the order of its calls

    def begin_round(self, compression: str | dict | Compressor | None = None) -> list[int]:
        """Begin a round, and sample the clients to ask.

        Args:
            compression: What to compress this round's model with; None: as usual.

        Returns:
            The clients to ask, in ascending order. A client whose late update has arrived since the last round is not
            asked; that update counts in this round.

        Raises:
            ConfigError: The last round has not ended, or the compression cannot be used for the way down.
            ExchangeError: The model is not finite.
        """
        if self._chosen is not None:
            raise ConfigError(f"round {self.round} has not ended")
        made = self.compressor if compression is None else checked_compressor(compression, DOWN_MEMORY)
        following = self.round + 1
        self.told_bytes = self._broadcast.tell(following, self.model, made, Stream(self._seed, "down", following, -1))
        self.round = following
        count = min(self.sampled, len(self.present))
        chosen = np.random.default_rng((self._seed, self.round)).choice(self.present, count, replace=False) if count else []  # type: ignore[var-annotated]
        self._chosen = sorted({int(client) for client in chosen} - self._received_updates.keys())
        return list(self._chosen)

    def choose(self, clients: Iterable[int]) -> None:
        """Ask other clients in this round than those that `begin_round` has sampled.

        Args:
            clients: Their numbers.

        Raises:
            ConfigError: No round has begun, or there is no such client.
        """
        if self._chosen is None:
            raise ConfigError("no round has begun")
        chosen = set(clients)
        if wrong := sorted(client for client in chosen if not 0 <= client < self.clients):
            raise ConfigError(f"clients {wrong}; allowed: 0 to {self.clients - 1}")
        self._chosen = sorted(chosen - self._received_updates.keys())

    def message_for(self, client: int) -> np.ndarray:
        """Make the message that brings a client's model to that of this round.

        An update of the client for an earlier round is not expected any more.

        Args:
            client: Number of the client.

        Returns:
            The message, uint8[m]: what the client has missed of the model.

        Raises:
            ConfigError: No round has begun, or an update of this client counts in this round; whether it is accepted cannot
                be told yet.
        """
        if self._chosen is None:
            raise ConfigError("no round has begun")
        if client in self._received_updates:
            raise ConfigError(f"client {client} has sent its update of this round")
        base, blobs = self._broadcast.take_missed(client, self.round)
        self._expected[client] = self.round
        message = Down(self.round, base, self._updates.taken[client], blobs).pack()
        self._sent += message.size
        return message

    def receive(self, client: int, message: np.ndarray) -> None:
        """Take the update that answers the last message to a client; between rounds it counts in the next one.

        Args:
            client: Number of the client.
            message: uint8[m].

        Raises:
            Rejected: The update is not acceptable; this is counted.
        """
        try:
            if client not in self._expected or client in self._received_updates:
                raise Rejected("late", f"client {client} is not expected to send anything now")
            message = as_message(message)
            self._received += message.size
            self._received_updates[client] = self._examined(client, message)
        except Rejected as error:
            self._reject(client, error)
            raise

    def _examined(self, client: int, message: np.ndarray) -> Received:
        """Check a message; between rounds it counts in the next one."""
        counts_in = self.round if self._chosen is not None else self.round + 1
        return self._updates.examine(client, message, self._expected[client], counts_in)

    def refuse(self, client: int, reason: str, text: str) -> None:
        """Reject an update without looking at it.

        Args:
            client: Number of the client.
            reason: One of messages.REASONS.
            text: The details.

        Raises:
            Rejected: Always; this is counted.
        """
        error = Rejected(reason, text)
        self._reject(client, error)
        raise error

    def _reject(self, client: int, error: Rejected) -> None:
        self.rejections[error.reason] += 1
        self._rejected.setdefault(client, str(error))

    def end_round(self) -> Report:
        """Aggregate the updates that have arrived, and take a step.

        If the mean or the optimizer raises an error, the round goes on with all its updates, and can be ended again; what an
        optimizer that is a function keeps of its own is its own affair.

        Returns:
            What happened in the round.

        Raises:
            ConfigError: No round has begun.
        """
        if self._chosen is None:
            raise ConfigError("no round has begun")
        came = dict(sorted(self._received_updates.items()))
        missing = [client for client in self._chosen if client not in came and client not in self._rejected]
        norms = {client: (one.container.k, one.norm) for client, one in came.items()}
        too_large, uncompared = self._norms.too_large(norms)
        for client in too_large:
            del came[client]
        estimates, mean = self._updates.aggregate(came, self._absent)
        model, norm, step = self.model.copy(), 0.0, self._step
        if mean is not None:
            norm = l2_norm(mean)
            step = self._step.made(model, mean)
        # Nothing has changed so far, and from here on nothing fails.
        self.model[:], self._step = model, step
        for client, reason in too_large.items():
            self._reject(client, Rejected("norm", reason))
        self._updates.accept(came, estimates)
        self._norms.remember(((one.container.k, one.norm) for one in came.values()), uncompared)
        stale = {client: self.round - one.up.round for client, one in came.items() if one.up.round < self.round}
        report = Report(self.round, list(came), stale, missing, self._rejected, norm, self._sent, self._received)
        for client in self._received_updates:
            self._expected.pop(client, None)
        self._chosen, self._received_updates, self._rejected, self._sent, self._received = None, {}, {}, 0, 0
        return report
