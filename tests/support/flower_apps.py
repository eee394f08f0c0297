"""Flower's messages in one process: nodes that run a ClientApp, and the grid through which a strategy asks them.

All records go through Flower's own serialization, as they do between processes.
"""

from collections.abc import Callable

import numpy as np
from flwr.app import Array, ArrayRecord, Context, Error, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.common.serde import recorddict_from_proto, recorddict_to_proto
from flwr.supercore.task_identity import TaskIdentity

from grace_ext.adapters.flower import CompressedFedAvg, CompressionMod

FEW = {"min_train_nodes": 1, "min_evaluate_nodes": 1, "min_available_nodes": 1}


def strategy(*args, **options) -> CompressedFedAvg:
    """One that waits for a single node only."""
    return CompressedFedAvg(*args, **FEW | options)


def sent(content: RecordDict) -> RecordDict:
    """The records as they arrive in another process."""
    return recorddict_from_proto(recorddict_to_proto(content))


def size_of(content: RecordDict) -> int:
    """Number of bytes of the records as they are sent."""
    return recorddict_to_proto(content).ByteSize()


def record(**arrays) -> ArrayRecord:
    return ArrayRecord({name: Array(np.asarray(array)) for name, array in arrays.items()})


def model(seed: int = 0, rows: int = 40) -> ArrayRecord:
    """Arrays of several shapes and dtypes."""
    random = np.random.default_rng(seed)
    return record(
        weight=random.standard_normal((rows, 10)).astype(np.float32),
        bias=random.standard_normal(19).astype(np.float64),
        scale=np.array(1.5, np.float32),
    )


def flat(arrays: ArrayRecord) -> np.ndarray:
    """All elements of a model, float32[d]."""
    return np.concatenate([array.numpy().astype(np.float32).reshape(-1) for array in arrays.values()])


def targets(count: int) -> list[np.ndarray]:
    """What clients train towards, float32[d] each."""
    return [flat(model(seed=100 + number)) for number in range(count)]


def moved(arrays: ArrayRecord, target: np.ndarray, share: float = 0.5) -> ArrayRecord:
    """A model that has gone a share of the way to a target, float32[d]."""
    found, at = {}, 0
    for name, array in arrays.items():
        values = array.numpy()
        goal = target[at : at + values.size].reshape(values.shape)
        found[name] = (values + share * (goal - values)).astype(values.dtype)
        at += values.size
    return record(**found)


class Node:
    """A supernode: a ClientApp that trains towards a target, and the Context that stays between messages."""

    def __init__(self, node_id: int, target: np.ndarray, samples: float = 1, mods=None, **mod):
        self.node_id, self.target, self.samples = node_id, target, samples
        self.context = Context(run_id=1, node_id=node_id, node_config={}, state=RecordDict(), run_config={})
        self.models: list[np.ndarray] = []
        self.bytes: list[tuple[int, int]] = []  # of each message, and of its reply
        self.app = ClientApp(mods=[CompressionMod(**mod)] if mods is None else mods)
        self.app.train()(self.train)
        self.app.evaluate()(self.evaluate)

    def metrics(self, arrays: ArrayRecord) -> MetricRecord:
        self.models.append(flat(arrays))
        return MetricRecord({"loss": float(np.linalg.norm(self.models[-1] - self.target)), "num-examples": self.samples})

    def train(self, message: Message, context: Context) -> Message:
        arrays = message.content["arrays"]
        content = {"arrays": moved(arrays, self.target), "metrics": self.metrics(arrays)}
        return Message(RecordDict(content), reply_to=message)

    def evaluate(self, message: Message, context: Context) -> Message:
        return Message(RecordDict({"metrics": self.metrics(message.content["arrays"])}), reply_to=message)

    def handle(self, message: Message) -> Message:
        """Answer a message; what the app raises becomes an error, as in a supernode."""
        size = size_of(message.content)
        message.content, self.context.state = sent(message.content), sent(self.context.state)
        try:
            reply = self.app(message, self.context)
        except Exception as error:
            return Message(Error(2, f"{type(error).__name__}: {error}"), reply_to=message)
        self.bytes.append((size, size_of(reply.content)))
        reply.content = sent(reply.content)
        return reply


class LocalGrid:
    """A grid whose nodes answer at once, in this process.

    down, up: called with a node and the message to it, or its reply; they return what arrives, or None if nothing does.
    """

    def __init__(self, nodes: list[Node], down: Callable | None = None, up: Callable | None = None):
        TaskIdentity.run_id = TaskIdentity.task_id = TaskIdentity.node_id = 1
        self.nodes = {node.node_id: node for node in nodes}
        self.down, self.up = down or (lambda node, message: message), up or (lambda node, reply: reply)

    def get_node_ids(self):
        return list(self.nodes)

    def send_and_receive(self, messages, *, timeout=None):
        replies = []
        for message in list(messages):
            node = self.nodes[message.metadata.dst_node_id]
            if (arrived := self.down(node, message)) is not None and (reply := self.up(node, node.handle(arrived))):
                replies.append(reply)
        return replies
