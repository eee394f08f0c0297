"""The way up: which updates of clients are acceptable, what they amount to, and their mean."""

import functools
import math
from collections.abc import Collection, Mapping
from typing import NamedTuple

import numpy as np

from ..errors import ConfigError, ContainerError
from ..means.base import Mean, Update, check_mean, l2_norm
from ..pipeline.container import Container
from ..pipeline.decoder import decode_sum
from .client import MEMORIES
from .estimate import Estimate
from .messages import WHOLE, Rejected, Up, read_up
from .weights import Weights

_LARGEST_NORM = 2.0**100  # of an update; with larger ones, some rounds would take a float32 model to Inf


class Received(NamedTuple):
    """An update that has passed all checks that need no other update.

    Attributes:
        up: The message.
        container: Its container, parsed.
        norm: L2 norm of what counts in the mean.
    """

    up: Up
    container: Container
    norm: float


class Aggregate(NamedTuple):
    """What the updates of a round amount to.

    Attributes:
        estimates: With memory "ef21", the corrected estimates of the clients whose updates were accepted.
        mean: The mean, float32[d]; None if no update was accepted.
    """

    estimates: dict[int, Estimate]
    mean: np.ndarray | None


class ClientUpdates:
    """Checks the updates of clients, keeps what the server knows of each client's updates, and takes their mean.

    Args:
        size: Number of elements of the model.
        clients: Number of clients, which are numbered from 0.
        mean: The mean that is taken.
        weights: How much each client counts.
        memory: The memory of the clients.
        staleness: By how many rounds an update may be late.

    Raises:
        ConfigError: An argument is out of range, or the mean is meaningless with these weights.
    """

    def __init__(self, size: int, clients: int, mean: Mean, weights: Weights, memory: str, staleness: int):
        if memory not in MEMORIES:
            raise ConfigError(f"memory={memory!r}; allowed: {', '.join(MEMORIES)}")
        if staleness < 0:
            raise ConfigError(f"staleness={staleness}; allowed: from 0 on")
        self._size, self._mean, self._weights, self._memory, self._staleness = size, mean, weights, memory, staleness
        check_mean(mean, weights.uniform)
        #: For each client, the round of its last update that was accepted; 0: none.
        self.taken = dict.fromkeys(range(clients), 0)
        #: With memory "ef21", the estimate of each client's update.
        self.estimates: dict[int, Estimate] = {}
        self._samples: dict[int, float] = {}

    def examine(self, client: int, message: np.ndarray, asked: int, round_: int) -> Received:
        """Check a message that a client has sent.

        Args:
            client: Number of the client.
            message: uint8[m].
            asked: The round whose model the client was sent last.
            round_: The round in which the update counts.

        Returns:
            The update.

        Raises:
            Rejected: The update is not acceptable.
        """
        up, parsed = read_up(message, self._size)
        if up.round != asked:
            raise Rejected("late", f"an update of round {up.round}; one of round {asked} is expected")
        if round_ - up.round > self._staleness:
            raise Rejected(
                "late",
                f"an update of round {up.round} in round {round_}; it may be late by at most {self._staleness} rounds",
            )
        self._check_base(client, up.base)
        if parsed.non_finite:
            raise Rejected("not finite", "the gradient of the sender held a NaN or an Inf")
        if self._mean.by_coordinate and self._memory != "ef21" and parsed.index_id and parsed.k < parsed.domain:
            raise Rejected(
                "sparse",
                f"{parsed.k} of {parsed.domain} elements; {type(self._mean).__name__} needs all, because elements that most "
                "clients do not send would become 0: a dense compression, or memory 'ef21'",
            )
        norm = l2_norm(self._update(client, up, parsed))
        if not math.isfinite(norm):
            raise Rejected("not finite", "the update holds a NaN or an Inf")
        if norm > _LARGEST_NORM:
            raise Rejected("norm", f"{norm:.4g}, where at most {_LARGEST_NORM:.4g} is allowed whatever others send")
        return Received(up, parsed, norm)

    def _check_base(self, client: int, base: int) -> None:
        """Reject an update that does not fit the client's estimate. A client without a state sends base 0: both begin again."""
        if self._memory != "ef21":
            if base != WHOLE:
                raise Rejected("estimate", f"a client with memory 'ef21'; this server has {self._memory!r}")
        elif base == WHOLE:
            raise Rejected("estimate", "a client without memory 'ef21', which this server has")
        elif base not in (0, self.taken[client]):
            raise Rejected(
                "estimate",
                f"a correction of the estimate after round {base}; it is that after round "
                f"{self.taken[client]}: the client has to begin again with zeros, and base 0",
            )

    def _update(self, client: int, up: Up, parsed: Container) -> np.ndarray:
        """Decode what counts in the mean, float32[d]: the update or, with "ef21", the estimate that it corrects."""
        change = self._decoded(parsed)
        if up.base not in (WHOLE, 0):
            change += self.estimates[client].known
        return change

    def _decoded(self, parsed: Container) -> np.ndarray:
        change = np.empty(self._size, np.float32)
        try:
            decode_sum([parsed], change)
        except ContainerError as error:
            raise Rejected("malformed", str(error)) from error
        return change

    def aggregate(self, received: Mapping[int, Received], absent: Collection[int]) -> Aggregate:
        """Compute what a round's updates amount to. Nothing changes until `accept`.

        Args:
            received: The accepted updates of the round, by client.
            absent: The clients that have left, whose estimates do not count.

        Returns:
            The corrected estimates, and the mean of the updates or, with memory "ef21", of the estimates of all clients'
            updates.
        """
        corrected = {}
        if self._memory == "ef21":
            corrected = {client: Estimate(self._update(client, one.up, one.container)) for client, one in received.items()}
        return Aggregate(corrected, self._mean_of(received, corrected, absent))

    def accept(self, received: Mapping[int, Received], corrected: Mapping[int, Estimate]) -> None:
        """Note that the updates of a round were accepted.

        Args:
            received: The accepted updates, by client.
            corrected: The corrected estimates, as `aggregate` returned them.
        """
        self.taken |= {client: one.up.round for client, one in received.items()}
        self._samples |= {client: one.up.samples for client, one in received.items()}
        self.estimates |= corrected

    def _mean_of(
        self, received: Mapping[int, Received], corrected: dict[int, Estimate], absent: Collection[int]
    ) -> np.ndarray | None:
        if self._memory == "ef21":
            samples = self._samples | {client: one.up.samples for client, one in received.items()}
            known = {
                client: (samples[client], lambda vector=estimate.known: vector, l2_norm(estimate.known), False)
                for client, estimate in (self.estimates | corrected).items()
                if client not in absent
            }
        else:
            known = {
                client: (one.up.samples, functools.partial(self._decoded, one.container), one.norm, one.container.is_sparse)
                for client, one in received.items()
            }
        if not known or not received:
            return None
        shares = self._weights.shares({client: samples for client, (samples, *_) in known.items()})
        updates = [
            Update(vector, norm, shares[client], lambda is_sparse=is_sparse: not is_sparse)  # type: ignore[misc]
            for client, (_, vector, norm, is_sparse) in known.items()
        ]
        return self._mean(updates, self._size)

    def state_dict(self) -> dict[str, np.ndarray]:
        """Return what the next round needs.

        Returns:
            Arrays by name, for numpy.savez.
        """
        return {
            "memory": np.array(self._memory),
            "taken": np.array([self.taken[client] for client in range(len(self.taken))], np.int64),
            **{f"estimate.{client}": estimate.known for client, estimate in self.estimates.items()},
            **{f"samples.{client}": np.float64(samples) for client, samples in self._samples.items()},  # type: ignore[misc]
        }

    def load_state_dict(self, state: Mapping[str, np.ndarray]) -> None:
        """Restore what `state_dict` returned.

        Args:
            state: Arrays by name, at least those of `state_dict`.

        Raises:
            ConfigError: The state is of another memory, of a model of another size, or of another number of clients.
            KeyError: A part is missing. Nothing has changed then, in either case.
        """
        if (memory := str(state["memory"])) != self._memory:
            raise ConfigError(f"the state is of clients with memory {memory!r}, not {self._memory!r}")
        taken = dict(enumerate(state["taken"].tolist()))
        by_client: dict[str, dict[int, np.ndarray]] = {"estimate": {}, "samples": {}}
        for key in state:
            kind, _, client = key.partition(".")
            if client and kind in by_client:
                by_client[kind][int(client)] = state[key]
        estimates = {client: Estimate(one) for client, one in by_client["estimate"].items()}
        samples = {client: float(one) for client, one in by_client["samples"].items()}
        if len(taken) != len(self.taken) or any(one.known.size != self._size for one in estimates.values()):
            sizes = sorted({one.known.size for one in estimates.values()})
            raise ConfigError(
                f"the state is of {len(taken)} clients, with estimates of {sizes} elements; this server has {len(self.taken)} "
                f"clients, and {self._size} elements"
            )
        if unknown := estimates.keys() - samples.keys() | (samples.keys() - taken.keys()):
            raise ConfigError(f"the state lacks a part of the clients {sorted(unknown)}")
        self.taken, self.estimates, self._samples = taken, estimates, samples
