"""The nodes of a bucket that chooses its strategy while the graph stays the same: communicator="auto" in TensorFlow."""

import functools

import numpy as np
import tensorflow as tf

from grace_ext.exchange.bypass import BypassPending

from .nodes import BucketNodes
from .transport import GraphHandle, collective

#: The kinds of collectives, by number: none, those that carry containers and sums, and those of gradients that bypass.
_BYPASSES = {"float32": tf.float32, "fp16": tf.float16}
_KINDS = ("", "allgather", "alltoall", "allreduce of float32", "allreduce of float16", *_BYPASSES)
_NO_BYTES, _NO_SPLITS = np.empty(0, np.uint8), np.empty(0, np.int32)


class SwitchedNodes(BucketNodes):
    """The nodes of all strategies. Collectives take and give bytes, and the Python part before each says which kind it is in
    this step. Gradients that bypass the exchange have collectives of their own."""

    def __init__(self, graph, bucket, prescale):
        super().__init__(graph, bucket, prescale)
        self._levels = bucket.communicator.max_collectives(self._exchange.transport)
        self._may_bypass = not bucket.memory.has_hooks

    def start(self, gradients, order):
        sent = self._python_node(self._encode, self._inputs(gradients), order, [tf.uint8] if self._has_sketch else [])
        if not self._may_bypass:
            return sent
        with tf.device("/cpu:0"):
            bypassed = [
                self._bypassed(sent[0], number, gradients[tensor.name]) for number, tensor in enumerate(self._bucket.tensors)
            ]
        return [*sent, *bypassed]

    def _python_node(self, function, inputs, order, further=()) -> list[tf.Tensor]:
        """A node of Python: it gives the number of a collective's kind, the collective's inputs, and vectors of dtypes that
        are further to it."""
        kind, *vectors = self._graph.call(function, inputs, [tf.int32, tf.uint8, tf.int32, *further], order)
        kind.set_shape([])
        for vector in vectors:
            vector.set_shape([None])
        return [kind, *vectors]

    def _bypassed(self, kind, number, gradient) -> tf.Tensor:
        """The reduced gradient, [its elements]; empty if it does not bypass."""
        factors = {"prescale_factor": self._prescale, "postscale_factor": self._exchange.weight}

        def by(dtype):
            name = f"{self._bucket.name}.{number}.{dtype.name}"
            process_set = self._graph.process_set
            flat = tf.cast(tf.reshape(gradient, [-1]), dtype)
            return tf.cast(collective("allreduce", [flat], name, process_set, **factors), tf.float32)

        branches = [
            functools.partial(by, _BYPASSES[name]) if name in _BYPASSES else lambda: tf.zeros([0]) for name in _KINDS
        ]
        result = tf.switch_case(kind, branches)
        result.set_shape([None])
        return result

    def exchange(self, sent, order, process_set):
        inputs, others = sent[:3], sent[3:]
        if self._has_sketch:
            others = [collective("allgather", others, f"{self._bucket.name}.sketch", process_set)]
        received = self._collective(0, *inputs, process_set)
        for level in range(1, self._levels):
            inputs = self._python_node(functools.partial(self._advance, level), [received], order)
            received = self._collective(level, *inputs, process_set)
        return [received, *others]

    def _collective(self, level, kind, payload, splits, process_set) -> tf.Tensor:
        branches = [
            functools.partial(_by_bytes, name, payload, splits, f"{self._bucket.name}.{level}.{name}", process_set)
            for name in _KINDS
        ]
        with tf.device("/cpu:0"):
            received = tf.switch_case(kind, branches)
        received.set_shape([None])
        return received

    def finish(self, received, order, gradients):
        flat, bypasses = self._graph.call(self._decode, received, [tf.float32, tf.bool], order)
        if not self._may_bypass:
            return self._of_exchange(flat, gradients)
        bypasses.set_shape([])
        return tf.cond(bypasses, lambda: self._by_name(received[1:], gradients), lambda: self._of_exchange(flat, gradients))

    def _of_exchange(self, flat, gradients) -> dict[str, tf.Tensor]:
        return self._by_name(tf.split(tf.ensure_shape(flat, [self._bucket.size]), self._bucket.sizes), gradients)

    def _encode(self, *arrays):
        dtype = self._exchange.bypass_dtype(self._bucket)
        if dtype is None:
            super()._encode(*arrays)
            pending = self._exchange.pending(self._bucket)
            return [*self._outputs_for(pending.handle), *(pending.sketch.sent if self._has_sketch else [])]
        if self._is_first:
            self._graph.begin_step()
        if on_gradient := self._exchange.gradient_callback(self._bucket):
            gradient = np.empty(self._bucket.size, np.float32)
            self._pack(arrays, gradient)
            on_gradient(gradient, None)
        handle = GraphHandle(dtype)
        self._exchange.submit_bypass(self._bucket, BypassPending(handle, self._bucket.size * _BYPASSES[dtype].size, {}))
        return self._outputs_for(handle)

    @staticmethod
    def _outputs_for(handle: GraphHandle | None) -> list:
        """The outputs of a Python part. handle: of the collective to start next; None if there is none."""
        if handle is None or handle.collective in _BYPASSES:
            return [np.int32(_KINDS.index(handle.collective if handle else "")), _NO_BYTES, _NO_SPLITS]
        payload, *splits = handle.sent
        kind = f"allreduce of {payload.dtype}" if handle.collective == "allreduce" else handle.collective
        return [np.int32(_KINDS.index(kind)), payload.view(np.uint8), splits[0] if splits else _NO_SPLITS]

    def _advance(self, level, received):
        handle = self._receive(received)
        if level >= len(self._bucket.communicator.collectives_of(self._exchange.transport)):
            return self._outputs_for(None)
        self._exchange.advance(self._bucket)
        following = self._exchange.pending(self._bucket).handle
        return self._outputs_for(None if following is handle else following)

    def _receive(self, received) -> GraphHandle:
        handle = self._exchange.pending(self._bucket).handle
        if handle.received is None:
            handle.receive(received.view(handle.sent[0].dtype) if handle.sent else received, self._graph.idle_since)
        return handle

    def _decode(self, received, *others):
        bypasses = self._receive(received).collective in _BYPASSES
        if self._has_sketch:
            self._exchange.pending(self._bucket).sketch.receive(*others, self._graph.idle_since)
        out = np.empty(0, np.float32) if bypasses else self._results.unused()
        self._finish(received, out)
        return [out, np.bool_(bypasses)]


def _by_bytes(kind: str, payload: tf.Tensor, splits: tf.Tensor, name: str, process_set) -> tf.Tensor:
    """A collective of _KINDS, uint8[m] -> uint8[n]."""
    name = name.replace(" ", "_")
    if kind == "allgather":
        return collective(kind, [payload], name, process_set)
    if kind == "alltoall":
        return collective(kind, [payload, splits], name, process_set)
    if kind.startswith("allreduce"):
        dtype = tf.as_dtype(kind.split()[-1])
        values = tf.bitcast(tf.reshape(payload, [-1, dtype.size]), dtype)
        return tf.reshape(tf.bitcast(collective("allreduce", [values], name, process_set), tf.uint8), [-1])
    return tf.zeros([0], tf.uint8)
