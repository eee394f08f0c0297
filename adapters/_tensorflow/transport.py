"""Horovod's collectives for TensorFlow: as nodes of a graph, and at once."""

import time

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf

from grace_ext.transport import CollectiveHandle, Transport

from .._horovod.splits import as_splits


class _Transport(Transport):
    """Every collective comes through `_start`, with its inputs."""

    def __init__(self, process_set):
        self.rank, self.size, self.world_rank = process_set.rank(), process_set.size(), hvd.rank()
        self._process_set = process_set

    def allgather(self, name, payload):
        return self._start("allgather", name, payload)

    def allreduce(self, name, array):
        return self._start("allreduce", name, array)

    def alltoall(self, name, payload, splits):
        return self._start("alltoall", name, payload, as_splits(name, splits))


class GraphTransport(_Transport):
    """Leaves the inputs of a collective in its handle. The graph takes them from there, and brings the result."""

    can_fuse = False  # its nodes are there before the first step

    def probe_transport(self):
        return EagerTransport(self._process_set)

    def _start(self, kind, name, *arrays):
        return GraphHandle(kind, *arrays)


class EagerTransport(_Transport):
    """Collectives from Python, each at once: for the Python part that ends a step, and for what happens between steps."""

    can_fuse = False  # one of them is over before the next one starts

    def gather_to(self, name: str, payload: np.ndarray, to: int) -> list[np.ndarray]:
        """A collective that returns all ranks' payloads, uint8[m], on rank `to` only, an empty list elsewhere."""
        lengths = self.allgather(f"{name}.length", np.array([payload.size], "<i8").view(np.uint8)).wait().view("<i8")
        received = self.allgather(name, payload).wait()
        return np.split(received, np.cumsum(lengths)[:-1]) if self.rank == to else []

    def _start(self, kind, name, *arrays):
        received = collective(kind, [tf.constant(array) for array in arrays], name, self._process_set)
        return CollectiveHandle.finished(received.numpy())


class GraphHandle(CollectiveHandle):
    """A collective that the graph carries out: one node takes what is `sent`, another brings what was received."""

    def __init__(self, collective: str, *sent: np.ndarray):
        """sent: the collective's inputs."""
        super().__init__(lambda: self.received)
        self.collective = collective
        self.sent = list(sent)
        self.received: np.ndarray | None = None

    def receive(self, array: np.ndarray, idle_since: float) -> None:
        """idle_since: when the exchange had nothing left to do but to wait."""
        self.received, self.waited_seconds = array, time.perf_counter() - idle_since


def collective(kind: str, sent: list[tf.Tensor], name: str, process_set, **factors) -> tf.Tensor:
    """factors: of an allreduce."""
    options = {"name": name, "ignore_name_scope": True, "process_set": process_set, **factors}
    with tf.device("/cpu:0"):  # where the codecs are
        if kind in ("allgather", "broadcast"):  # in a broadcast only one rank has something
            return hvd.allgather(*sent, **options)
        if kind == "alltoall":
            return hvd.alltoall(*sent, **options)[0]
        return hvd.allreduce(*sent, op=hvd.Sum, **options)
