"""The server's side: Flower's FedAvg with containers in both directions, and the aggregation of grace_ext.federated."""

import logging
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.serverapp import Grid
from flwr.serverapp.strategy import FedAvg, Result

from grace_ext import ConfigError
from grace_ext.federated import Rejected, Report, Server
from grace_ext.federated.client import MEMORIES
from grace_ext.federated.compression import checked_compressor
from grace_ext.federated.messages import FRESH, read_down
from grace_ext.federated.weights import Weights
from grace_ext.means import Mean, WeightedMean
from grace_ext.outer import OuterOptimizer

from .layout import Layout
from .metrics import comparable
from .nodes import Nodes
from .records import Told, needs_model, read_update

_LOG = logging.getLogger("grace_ext")


class CompressedFedAvg(FedAvg):
    """Flower's FedAvg with containers in both directions, for clients whose ClientApp has a CompressionMod.

    The server tells clients the difference from the model that they have, and they send what training has changed; what a
    container leaves out is sent later, in both directions. Sampling, waiting, keys and metrics are those of FedAvg. What
    differs: a reply that cannot be used is left out, with a warning, and the round goes on; and all clients count alike,
    unless `weights` says otherwise, because a client's number of samples cannot be checked.

    Args:
        compression: Spec for the way down; neither low-rank nor unbiased.
        client_compression: Spec for the updates; None: as on the way down.
        memory: The memory of the clients: "residual", "ef21" or "none".
        mean: A mean of grace_ext.means; None: the weighted mean. See Server there.
        optimizer: An outer optimizer, its spec, or a function; None: FedAvg's step. See Server.
        weights: "uniform", "samples", or a mapping from the ID of each node that may take part to its weight.
        most_samples: The most samples of a client that count, with weights "samples".
        norm_limit: How many times the median norm an update may have. See Server.
        keep: Number of rounds whose containers are kept for clients that have missed them.
        most_nodes: How many nodes may take part in a training, those that have left included. A supernode that is started
            anew without a key of its own is another node.
        shared_start: Whether clients begin with the same initial model (CompressionMod(start=...)), so that it is sent to
            those only that do not have it.
        unchanged: Patterns of the names of arrays that stay as they are in the initial model, and are not sent after it; those
            that are not of floating point need one.
        seed: Seed of the compressor's random numbers.
        **options: Those of FedAvg.

    Raises:
        ConfigError: An argument is out of range, or they do not go together.
    """

    def __init__(
        self,
        compression: str = "topk:0.1/rice/qsgd:7",
        *,
        client_compression: str | None = None,
        memory: str = "residual",
        mean: Mean | None = None,
        optimizer: str | OuterOptimizer | Callable | None = None,
        weights: str | Mapping[int, float] = "uniform",
        most_samples: float | None = None,
        norm_limit: float = 10.0,
        keep: int = 16,
        most_nodes: int = 10000,
        shared_start: bool = False,
        unchanged: Sequence[str] = (),
        seed: int = 0,
        **options: Any,
    ):
        super().__init__(**options)
        self._up = compression if client_compression is None else client_compression
        if memory not in MEMORIES:
            raise ConfigError(f"memory={memory!r}; allowed: {', '.join(MEMORIES)}")
        for spec in (compression, self._up):
            if not isinstance(spec, str):
                raise ConfigError(f"compression={spec!r}; allowed: a spec, which clients are told as text")
        checked_compressor(self._up, memory)
        self._memory, self._unchanged = memory, tuple(unchanged)
        by_node = weights if isinstance(weights, Mapping) else None
        self._make_nodes = lambda: Nodes(most_nodes, by_node, 0 if shared_start else None)
        clients = self._make_nodes().most
        numbered = weights if by_node is None else dict(enumerate(by_node.values()))
        self._weights = Weights(numbered, most_samples, clients)
        self._server_options: dict[str, Any] = {
            "clients": clients,
            "compression": compression,
            "optimizer": optimizer,
            "mean": mean or WeightedMean(),
            "weights": numbered,
            "most_samples": most_samples,
            "memory": memory,
            "norm_limit": norm_limit,
            "staleness": 0,  # Flower hands nobody a reply that comes after its round
            "keep": keep,
            "seed": seed,
        }
        Server(np.zeros(1, np.float32), **self._server_options)  # errors come now, and not in the first round
        self._reset()

    def _reset(self) -> None:
        #: The server of grace_ext.federated; None before the first round.
        self.server: Server | None = None
        #: The report of each round.
        self.reports: list[Report] = []
        self._nodes = self._make_nodes()
        self._session = secrets.token_bytes(8)
        self._began = False  # whether the server is within a round
        self._made: ArrayRecord | None = None  # the model as it was given away last
        self._asked: dict[int, int] = {}  # node -> client, of the messages whose replies are expected

    def start(self, *args: Any, **options: Any) -> Result:
        """Run a training; see Flower's Strategy.start.

        Args:
            *args: As for Flower.
            **options: As for Flower.

        Returns:
            Flower's result.
        """
        self._reset()
        return super().start(*args, **options)

    def summary(self) -> None:
        """Log what the strategy does."""
        super().summary()
        options = self._server_options
        _LOG.info("federated: %s down, %s up, memory %r", options["compression"], self._up, self._memory)

    def configure_train(self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid) -> Iterable[Message]:
        """Make the messages that tell the chosen nodes the model to train on; see Flower's Strategy."""
        messages = super().configure_train(server_round, arrays, config, grid)
        self._begin(arrays, grid)
        messages = self._told(messages)
        self.server.choose(self._asked.values())
        return messages

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Make the messages that tell the chosen nodes the model to evaluate; see Flower's Strategy.

        The model is that of the next round of training, whose container is told already here.
        """
        messages = list(super().configure_evaluate(server_round, arrays, config, grid))
        if not messages:
            return []
        self._begin(arrays, grid)
        return self._told(messages)

    def _begin(self, arrays: ArrayRecord, grid: Grid) -> None:
        """Begin a round, unless it has begun for an evaluation, and note which nodes are there."""
        if self.server is None:
            self._layout = Layout.of(arrays, self._unchanged)
            self._initial = self._layout.unchanged(arrays)
            self._start_digest = self._layout.digest(arrays)
            self.server = Server(self._layout.vector(arrays), **self._server_options)
        elif arrays is not self._made:  # a strategy around this one has changed the model
            self.server.model[:] = self._layout.vector(arrays)
        self._made = arrays
        connected = self._nodes.known(grid.get_node_ids())
        for client in self._nodes.all - connected:
            self.server.leave(client)
        for client in connected.difference(self.server.present):
            self.server.join(client, self._nodes.rounds[client])
        if not self._began:
            self.server.begin_round()
            self._began = True

    def _told(self, messages: Iterable[Message]) -> list[Message]:
        """Put the containers into the messages. Nodes that may not take part get none."""
        self._asked, told = {}, []
        for message in sorted(messages, key=lambda one: one.metadata.dst_node_id):  # Flower's order is a random one
            node = message.metadata.dst_node_id
            if (client := self._nodes.number(node)) is None:
                continue
            self.server.join(client, self._nodes.rounds[client])
            down = self.server.message_for(client)
            content = RecordDict({key: one for key, one in message.content.items() if key != self.arrayrecord_key})
            self._tell(client, down).put(content)
            message.content = content
            self._asked[node] = client
            told.append(message)
        return told

    def _tell(self, client: int, message: np.ndarray) -> Told:
        whole = read_down(message, self._layout.size)[0].base == FRESH
        knows_layout = client in self._nodes.answered and self._nodes.rounds[client] is not None
        return Told(
            message,
            self._session,
            self.arrayrecord_key,
            self.weighted_by_key,
            self._up,
            self._memory,
            None if knows_layout else self._layout.text,
            None if knows_layout or whole else self._start_digest,
            self._initial if whole else None,
        )

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Check the updates, and take the server's step with those that are accepted; see Flower's Strategy."""
        contents = self._contents(replies, "aggregate_train")
        for client, content in contents.items():
            try:
                if (update := read_update(content)) is None:
                    self.server.refuse(
                        client, "malformed", "the reply has no container; does the client have a CompressionMod?"
                    )
                self.server.receive(client, update)
            except Rejected as error:
                _LOG.warning("federated: client %d: %s", client, error)
        report = self.server.end_round()
        self._began = False
        self.reports.append(report)
        if not report.taken:
            return None, None
        self._made = self._layout.arrays(self.server.model, self._initial)
        return self._made, self._metrics({client: contents[client] for client in report.taken}, self.train_metrics_aggr_fn)

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        """Average the metrics of the clients' evaluations; see Flower's Strategy."""
        return self._metrics(self._contents(replies, "aggregate_evaluate"), self.evaluate_metrics_aggr_fn)

    def _contents(self, replies: Iterable[Message], where: str) -> dict[int, RecordDict]:
        """Return, by client, the records of the replies of clients that had the model. Notes which model each one has."""
        contents: dict[int, RecordDict] = {}
        for reply in replies:
            client = self._asked.pop(reply.metadata.src_node_id, None)
            if client is None:
                _LOG.warning("federated: %s: node %d was not asked", where, reply.metadata.src_node_id)
            elif reply.has_error():
                _LOG.warning("federated: %s: client %d has failed: %s", where, client, reply.error.reason)
            elif needs_model(reply.content):
                _LOG.warning("federated: %s: client %d has not got the model, and will be told all of it", where, client)
                self._nodes.rounds[client] = None
            else:
                self._nodes.rounds[client] = self.server.round
                self._nodes.answered.add(client)
                contents[client] = reply.content
        return contents

    def _metrics(self, contents: Mapping[int, RecordDict], average: Callable) -> MetricRecord | None:
        chosen = comparable(contents, self.weighted_by_key, self._weights.weight)
        return average(chosen, self.weighted_by_key) if chosen else None
