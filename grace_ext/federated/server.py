"""The federated server: FedAvg with containers in both directions, for one vector of parameters.

FedAvg: McMahan et al., Communication-efficient learning of deep networks from decentralized data, AISTATS 2017; with
compression both ways and error feedback on both sides: Algorithm 2 of DeepReduce (Xu, Kostopoulou, Dutta et al., NeurIPS
2021, appendix). With memory "ef21" it is the parameter server of Kimad (Xin et al., DistributedML 2023, Algorithm 3).
"""

import collections
import dataclasses
import functools
import math
import os
import statistics
from collections.abc import Callable, Mapping

import numpy as np

from .._util.rng import Stream
from ..errors import ConfigError, ContainerError
from ..pipeline.compressor import Compressor, make_compressor
from ..pipeline.container import Container
from ..pipeline.decoder import decode_sum
from .client import MEMORIES
from .estimate import Estimate
from .mean import Mean, Update, WeightedMean
from .messages import FRESH, WHOLE, Down, Rejected, Up, as_message, read_up
from .weights import Weights

_EXACT = "dense/raw"
_FEWEST = 3  # norms from which on a median says anything
_NORMS = 32
_LONGEST = 2.0**100  # the norm of an update; with longer ones, some rounds would take a float32 model to Inf


@dataclasses.dataclass(frozen=True)
class Report:
    """Of a round, by the numbers of clients. stale: of those taken, by how many rounds they were late, where they were.
    missing: asked, but nothing came. rejected: why. norm: of the step that the model took, the L2 norm of the mean of all
    updates. sent, received: bytes of messages."""

    round: int
    taken: list[int]
    stale: dict[int, int]
    missing: list[int]
    rejected: dict[int, str]
    norm: float
    sent: int
    received: int


class Server:
    """Holds the model, and what clients know of it.

    start: float32[d], the same as on all clients. clients: how many there are, numbered from 0. sampled: of them in a round;
    None: all. optimizer(model, change): changes the model in place by the mean of the updates, float32[d] both; None:
    model -= change, which is FedAvg. mean: WeightedMean, ClippedMean, or Median, TrimmedMean or NearestNeighborMixing,
    which need uniform weights, and dense updates or memory "ef21" (otherwise: ConfigError; a sparse update is rejected).
    weights, most_samples: how much each client counts in a weighted or clipped mean (see Weights).
    memory: that of the clients. norm_limit: how many times the median norm of the last updates that were not 0 one may have;
    math.inf: any up to 2**100. staleness: by how many rounds an update may be late; it then counts in the round in which it
    comes, as much as others do. 0: it is rejected, and so is each update of a client that is always slower than a round.
    keep: rounds whose containers are kept for clients that have missed them; who missed more rounds, or more bytes than the
    model has, gets the model whole.
    """

    def __init__(
        self,
        start: np.ndarray,
        clients: int,
        compression="topk:0.1/rice/qsgd:7",
        *,
        sampled: int | None = None,
        optimizer: Callable | None = None,
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
        if memory not in MEMORIES:
            raise ConfigError(f"memory={memory!r}; allowed: {', '.join(MEMORIES)}")
        if not norm_limit > 1:
            raise ConfigError(f"norm_limit={norm_limit}; allowed: above 1")
        if staleness < 0:
            raise ConfigError(f"staleness={staleness}; allowed: from 0 on")
        if keep < 1:
            raise ConfigError(f"keep={keep}; allowed: from 1 on")
        self.compressor: Compressor = make_compressor(compression)
        self.model = np.array(start, np.float32).reshape(-1)
        self.told = Estimate(self.model.size, self.model)
        self.round, self.clients, self.sampled = 0, clients, sampled
        self.told_bytes = 0  # of the container that tells this round's model
        #: How many updates were rejected, by reason.
        self.rejections: collections.Counter[str] = collections.Counter()
        self._optimizer, self._memory, self._limit, self._seed = optimizer or _fedavg, memory, norm_limit, seed
        self._weights, self._mean_of = Weights(weights, most_samples, clients), mean or WeightedMean()
        self._check_mean()
        self._history: collections.OrderedDict[int, np.ndarray] = collections.OrderedDict()
        self._keep, self._staleness = keep, staleness
        self._at = dict.fromkeys(range(clients), 0)  # the round that each client's model is of; FRESH: not known
        self._taken = dict.fromkeys(range(clients), 0)
        self._asked: dict[int, int] = {}  # of clients whose update is expected, the round whose model they were sent
        self._gone: set[int] = set()
        #: Whether clients choose their densities. Then an update with m times the values of another may have sqrt(m) times
        #: its norm, which is the most that smaller values add.
        self.own_densities = False
        self._norms: collections.deque[tuple[int, float]] = collections.deque(maxlen=_NORMS)  # values of an update, its norm
        self._unscaled: dict[int, tuple[int, float]] = {}  # the same of clients whose update nothing could be compared with
        self._estimates: dict[int, Estimate] = {}  # with ef21, of each client's update
        self._samples: dict[int, float] = {}
        self._chosen: list[int] | None = None  # None: between rounds
        self._came: dict[int, tuple[Up, Container, float]] = {}  # since the last round ended: message, update, norm
        self._rejected: dict[int, str] = {}
        self._sent = self._received = 0

    def _check_mean(self) -> None:
        """Raises ConfigError for a mean that does not mean anything with these weights, memory or compression."""
        if not isinstance(self._mean_of, Mean):
            raise ConfigError(
                f"mean={self._mean_of!r}; allowed: an instance of WeightedMean, ClippedMean, Median, "
                "TrimmedMean or NearestNeighborMixing"
            )
        if not self._mean_of.by_coordinate:
            return
        kind = type(self._mean_of).__name__
        if not self._weights.uniform:
            raise ConfigError(f"mean {kind} counts clients and knows no weights; allowed: weights='uniform'")
        if self._memory != "ef21" and self.compressor.sparsifier.name != "dense":
            raise ConfigError(
                f"mean {kind} with memory {self._memory!r} and {str(self.compressor)!r}: where most clients "
                "send nothing of an element, it is 0, and what few send is lost; allowed: memory='ef21', or a "
                "dense compression"
            )

    # Who takes part

    def leave(self, client: int) -> None:
        """It is not asked any more."""
        self._gone.add(client)
        self._asked.pop(client, None)

    def join(self, client: int, round_: int | None = None) -> None:
        """It is there (again), with the model of that round; None: with nothing, and gets it whole."""
        self._gone.discard(client)
        self._asked.pop(client, None)
        self._at[client] = FRESH if round_ is None or not 0 <= round_ <= self.round else round_

    @property
    def present(self) -> list[int]:
        return [client for client in range(self.clients) if client not in self._gone]

    # A round, in the order of its calls

    def begin_round(self, compression=None) -> list[int]:
        """The clients to ask, ascending; a late update that has come since the last round stands for that of this round.
        compression: of this round's way down. Raises ExchangeError if the model is not finite, and ConfigError within a
        round."""
        if self._chosen is not None:
            raise ConfigError(f"round {self.round} has not ended")
        made = self.compressor if compression is None else make_compressor(compression)
        blob = self.told.tell(self.model, made, Stream(self._seed, "down", self.round + 1, -1))
        self.told_bytes = blob.size
        self.round += 1
        self._history[self.round] = blob
        while len(self._history) > self._keep:
            self._history.popitem(last=False)
        count = min(self.sampled, len(self.present))
        chosen = np.random.default_rng((self._seed, self.round)).choice(self.present, count, replace=False) if count else []
        self._chosen = sorted({int(client) for client in chosen} - self._came.keys())
        return list(self._chosen)

    def message_for(self, client: int) -> np.ndarray:
        """uint8[m]: what this client has missed of the model, up to this round's. An update of an earlier round is not
        expected any more. Raises ConfigError if an update of this client counts in this round: it cannot be told yet whether
        it is taken."""
        if client in self._came:
            raise ConfigError(f"client {client} has sent its update of this round")
        at = self._at[client]
        missed = range(at + 1, self.round + 1) if at != FRESH else None
        blobs = None
        if missed is not None and all(number in self._history for number in missed):
            blobs = [self._history[number] for number in missed]
        if blobs is None or len(blobs) > 1 and sum(blob.size for blob in blobs) > self.told.known.nbytes:
            at, blobs = FRESH, [make_compressor(_EXACT).compress(self.told.known)]
        self._at[client] = self._asked[client] = self.round
        message = Down(self.round, at, self._taken[client], blobs).pack()
        self._sent += message.size
        return message

    def receive(self, client: int, message: np.ndarray) -> None:
        """The update that answers the last message for this client; between rounds it counts in the next one. Raises
        Rejected, and counts it."""
        try:
            if client not in self._asked or client in self._came:
                raise Rejected("late", f"client {client} is not expected to send anything now")
            message = as_message(message)
            self._received += message.size
            self._came[client] = self._examined(client, message)
        except Rejected as error:
            self._reject(client, error)
            raise

    def _examined(self, client: int, message: np.ndarray) -> tuple[Up, Container, float]:
        """The message, its container, and the norm of what counts in the mean. Raises Rejected."""
        up, parsed = read_up(message, self.model.size)
        if up.round != self._asked[client]:
            raise Rejected("late", f"an update of round {up.round}; one of round {self._asked[client]} is expected")
        if self._counts_in - up.round > self._staleness:
            raise Rejected(
                "late",
                f"an update of round {up.round} in round {self._counts_in}; it may be late by at most "
                f"{self._staleness} rounds",
            )
        self._check_base(client, up.base)
        if parsed.non_finite:
            raise Rejected("not finite", "the gradient of the sender held a NaN or an Inf")
        if self._mean_of.by_coordinate and self._memory != "ef21" and parsed.index_id and parsed.k < parsed.domain:
            raise Rejected("sparse", f"{parsed.k} of {parsed.domain} elements; {type(self._mean_of).__name__} needs all")
        norm = _norm(self._update(client, up, parsed))
        if not math.isfinite(norm):
            raise Rejected("not finite", "the update holds a NaN or an Inf")
        if norm > _LONGEST:
            raise Rejected("norm", f"{norm:.4g}, where at most {_LONGEST:.4g} is allowed whatever others send")
        return up, parsed, norm

    @property
    def _counts_in(self) -> int:
        """The round in which an update that comes now counts."""
        return self.round if self._chosen is not None else self.round + 1

    def refuse(self, client: int, reason: str, text: str) -> None:
        """Count an update that is not even looked at. Raises Rejected."""
        error = Rejected(reason, text)
        self._reject(client, error)
        raise error

    def _reject(self, client: int, error: Rejected) -> None:
        self.rejections[error.reason] += 1
        self._rejected.setdefault(client, str(error))

    def _check_base(self, client: int, base: int) -> None:
        """Raises Rejected for an update that the client's estimate, or its absence, does not fit. A client without a state
        sends 0, and the estimate begins again."""
        if self._memory != "ef21":
            if base != WHOLE:
                raise Rejected("estimate", f"a client with memory 'ef21'; this server has {self._memory!r}")
        elif base == WHOLE:
            raise Rejected("estimate", "a client without memory 'ef21', which this server has")
        elif base not in (0, self._taken[client]):
            raise Rejected(
                "estimate",
                f"a correction of the estimate after round {base}; it is that after round "
                f"{self._taken[client]}: the client has to begin again with zeros, and base 0",
            )

    def _update(self, client: int, up: Up, parsed: Container) -> np.ndarray:
        """What the mean is of, float32[d]: the update that was sent, or with ef21 the estimate that it corrects. Raises
        Rejected."""
        change = self._decoded(parsed)
        if up.base not in (WHOLE, 0):
            change += self._estimates[client].known
        return change

    def _decoded(self, parsed: Container) -> np.ndarray:
        """float32[d]. Raises Rejected."""
        change = np.empty(self.model.size, np.float32)
        try:
            decode_sum([parsed], change)
        except ContainerError as error:
            raise Rejected("malformed", str(error)) from error
        return change

    def end_round(self) -> Report:
        """Aggregate what has come, and take a step. Raises ConfigError outside a round."""
        if self._chosen is None:
            raise ConfigError("no round has begun")
        came = dict(sorted(self._came.items()))
        missing = [client for client in self._chosen if client not in came and client not in self._rejected]
        norms = {client: (parsed.k, norm) for client, (_, parsed, norm) in came.items()}
        for client, reason in self._too_large(norms).items():
            del came[client]
            self._reject(client, Rejected("norm", reason))
        for client, (up, parsed, norm) in came.items():
            self._taken[client], self._samples[client] = up.round, up.samples
            self._norms.append((parsed.k, norm))
            if self._memory == "ef21":
                self._estimates[client] = Estimate(self.model.size, self._update(client, up, parsed))
        mean = self._mean(came)
        if mean is not None:
            self._optimizer(self.model, mean)
        stale = {client: self.round - up.round for client, (up, _, _) in came.items() if up.round < self.round}
        report = Report(
            self.round,
            list(came),
            stale,
            missing,
            self._rejected,
            0.0 if mean is None else _norm(mean),
            self._sent,
            self._received,
        )
        for client in self._came:
            self._asked.pop(client, None)
        self._chosen, self._came, self._rejected, self._sent, self._received = None, {}, {}, 0, 0
        return report

    def _too_large(self, came: dict[int, tuple[int, float]]) -> dict[int, str]:
        """The clients whose update's norm is beyond what is allowed, and why. came: number of values and norm of each
        update of this round.

        The median is that of norms above 0, so that clients which send zeros do not switch the check off. Where all but a
        few of the norms known are 0, nothing can be compared, and only zeros are taken, until so many different clients
        have sent something else that there is a median. A norm that is too large is no part of the median that others are
        judged by.
        """
        if math.isinf(self._limit):
            return {}
        before = [one for client, one in self._unscaled.items() if client not in came]
        self._unscaled |= {client: one for client, one in came.items() if one[1] > 0}
        refused: dict[int, str] = {}
        while True:
            left = {client: one for client, one in came.items() if client not in refused}
            seen = [*self._norms, *left.values(), *before]
            above = [(k, norm) for k, norm in seen if norm > 0]
            if len(seen) >= _FEWEST and len(above) < min(_FEWEST, self.clients):
                return refused | {
                    client: f"{norm:.4g}, where nearly all others are 0: there is nothing to compare it with"
                    for client, (_, norm) in left.items()
                    if norm > 0
                }
            further = self._beyond(left, above) if len(seen) >= _FEWEST else {}
            if not further:
                self._unscaled.clear()
                return refused
            refused |= further

    def _beyond(self, came: dict[int, tuple[int, float]], norms: list[tuple[int, float]]) -> dict[int, str]:
        """Of a round's updates, those which are too large for the median of these norms, and why."""
        most = {client: self._limit * self._median(k, norms) for client, (k, _) in came.items()}
        return {
            client: f"{norm:.4g}, where at most {most[client]:.4g} is allowed"
            for client, (_, norm) in came.items()
            if norm > most[client]
        }

    def _median(self, k: int, norms: list[tuple[int, float]]) -> float:
        """Of norms, as far as they can be compared with that of an update of k values. norms: values and norms of others."""
        return statistics.median(
            norm * math.sqrt(max(1.0, k / max(count, 1))) if self.own_densities else norm for count, norm in norms
        )

    def _mean(self, came: dict) -> np.ndarray | None:
        """The mean, float32[d], of this round's updates, or with ef21 of what is known of all clients' updates."""
        if self._memory == "ef21":
            known = {
                client: (self._samples[client], lambda vector=estimate.known: vector, _norm(estimate.known))
                for client, estimate in self._estimates.items()
                if client not in self._gone
            }
        else:
            known = {
                client: (up.samples, functools.partial(self._decoded, parsed), norm)
                for client, (up, parsed, norm) in came.items()
            }
        if not known or not came:
            return None
        shares = self._weights.shares({client: samples for client, (samples, _, _) in known.items()})
        updates = [Update(vector, norm, shares[client]) for client, (_, vector, norm) in known.items()]
        return self._mean_of(updates, self.model.size)

    # State

    def save(self, path) -> None:
        """All that the next round needs, between rounds; the file is there whole or not at all. An optimizer's own state is
        not in it."""
        if self._chosen is not None:
            raise ConfigError(f"round {self.round} has not ended")
        clients = range(self.clients)
        state = {
            "model": self.model,
            "told": self.told.known,
            "round": self.round,
            "norms": np.array(self._norms).reshape(-1, 2),
            "unscaled": np.array([(client, *one) for client, one in self._unscaled.items()]).reshape(-1, 3),
            "at": np.array([self._at[client] for client in clients], np.int64),
            "taken": np.array([self._taken[client] for client in clients], np.int64),
            "received": self._received,
            "asked": np.array(list(self._asked.items()), np.int64).reshape(-1, 2),
            **{f"came.{client}": up.pack() for client, (up, _, _) in self._came.items()},
            "gone": np.array(sorted(self._gone), np.int64),
            "history": np.array(list(self._history), np.int64),
            "reasons": np.array(list(self.rejections), np.str_),
            "counts": np.array(list(self.rejections.values()), np.int64),
            **{f"blob.{number}": blob for number, blob in self._history.items()},
            **{f"estimate.{client}": estimate.known for client, estimate in self._estimates.items()},
            **{f"samples.{client}": samples for client, samples in self._samples.items()},
        }
        with open(f"{path}.new", "wb") as file:
            np.savez(file, **state)
        os.replace(f"{path}.new", path)

    def load(self, path) -> None:
        """The inverse. Raises ConfigError for a state of another size or number of clients, or of a version without a part
        of it."""
        with np.load(path, allow_pickle=False) as state:
            if missing := _SAVED - set(state.files):
                raise ConfigError(f"{path} lacks {', '.join(sorted(missing))}: not a server's state, or an older one")
            if state["model"].size != self.model.size or state["at"].size != self.clients:
                raise ConfigError(
                    f"{path} is of {state['model'].size} elements and {state['at'].size} clients, this server "
                    f"has {self.model.size} and {self.clients}"
                )
            self.model[:] = state["model"]
            self.told = Estimate(self.model.size, state["told"])
            self.round = int(state["round"])
            self._norms.clear()
            self._norms.extend((int(k), norm) for k, norm in state["norms"].tolist())
            self._unscaled = {int(client): (int(k), norm) for client, k, norm in state["unscaled"].tolist()}
            self._at, self._taken = (dict(enumerate(state[key].tolist())) for key in ("at", "taken"))
            self._gone = set(state["gone"].tolist())
            history = state["history"].tolist()
            self._history = collections.OrderedDict((number, state[f"blob.{number}"]) for number in history)
            counted = zip(state["reasons"].tolist(), state["counts"].tolist(), strict=True)
            self.rejections = collections.Counter(dict(counted))
            named = [(*key.split("."), state[key]) for key in state.files if key.startswith(("estimate.", "samples."))]
            self._estimates = {
                int(client): Estimate(self.model.size, one) for kind, client, one in named if kind == "estimate"
            }
            self._received = int(state["received"])
            self._asked = dict(state["asked"].tolist())
            self._came = {}
            for key in state.files:
                if key.startswith("came."):
                    client = int(key.removeprefix("came."))
                    self._came[client] = self._examined(client, state[key])
            self._samples = {int(client): float(one) for kind, client, one in named if kind == "samples"}


#: What every state has.
_SAVED = {
    "model",
    "told",
    "round",
    "norms",
    "unscaled",
    "at",
    "taken",
    "received",
    "asked",
    "gone",
    "history",
    "reasons",
    "counts",
}


def _norm(vector: np.ndarray) -> float:
    """L2, in float64, so that it is finite for every float32[d] that is."""
    return float(np.linalg.norm(vector.astype(np.float64)))


def _fedavg(model: np.ndarray, change: np.ndarray) -> None:
    model -= change
