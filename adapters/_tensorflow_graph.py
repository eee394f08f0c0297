"""An exchange as nodes of a TensorFlow graph.

A bucket's way: tf.numpy_function that packs and encodes -> Horovod's operation, a node of the graph -> tf.numpy_function
that decodes. Horovod pairs the operations of the ranks by their names, so ranks may reach them in any order; the Python
parts of a step run one after the other, in the same order on all ranks.
"""

import concurrent.futures
import functools
import sys
import time
import weakref

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf

from grace_ext import ExchangeError
from grace_ext.buckets import Bucket
from grace_ext.communicators import Transport
from grace_ext.exchange import Exchange
from grace_ext.kernels.half import bf16_decode, fp16_decode
from grace_ext.rows import RowBucket, RowGradient
from grace_ext.scratch import scratch_in

_ALIGNMENT = 64  # bytes; TensorFlow copies what starts elsewhere
_PART = 2**18  # elements that are copied at a time


class GraphTransport(Transport):
    """What a bucket gives to a collective is left in the handle, for the graph to take it from there and to bring the
    result."""

    can_fuse = False  # its nodes are there before the first step

    def __init__(self, process_set):
        self.rank, self.size = process_set.rank(), process_set.size()

    def allgather(self, name, payload):
        return _Handle(payload)

    def allreduce(self, name, array):
        return _Handle(array)

    def alltoall(self, name, payload, splits):
        return _Handle(payload, np.array(splits, np.int32))


class _Handle:
    def __init__(self, *sent: np.ndarray):
        """sent: the collective's inputs."""
        self.sent = list(sent)
        self.received: np.ndarray | None = None
        self.waited = 0.0

    def receive(self, array: np.ndarray, idle_since: float) -> None:
        """idle_since: when the exchange had nothing to do any more but to wait."""
        self.received, self.waited = array, time.perf_counter() - idle_since

    def wait(self) -> np.ndarray:
        return self.received


class CallersThread(concurrent.futures.Executor):
    """Runs what is submitted at once: TensorFlow's threads wait for it anyway, and handing over costs more than small
    buckets do."""

    def submit(self, function, /, *args, **kwargs):
        future = concurrent.futures.Future()
        try:
            future.set_result(function(*args, **kwargs))
        except BaseException as error:
            future.set_exception(error)
        return future


class ExchangeGraph:
    """Adds the nodes of an exchange's step to the graph that is being traced."""

    def __init__(self, exchange: Exchange, process_set, prescale: float):
        self.exchange = exchange
        #: The last error of the Python parts. TensorFlow raises its own with the same text.
        self.error: BaseException | None = None
        self.idle_since = 0.0
        self._process_set = process_set
        self._arrays: dict[str, np.ndarray] = {}  # scratch, the same whichever thread TensorFlow takes
        #: Helps with copying.
        self.helper = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="grace_ext")
        self._nodes = [(_RowNodes if isinstance(bucket, RowBucket) else _BucketNodes)(self, bucket, prescale)
                       for bucket in exchange.buckets]
        #: By graph, the name of the node after which the next step's go on. (The node itself would keep its graph alive.)
        self._last_node: weakref.WeakKeyDictionary[tf.Graph, str] = weakref.WeakKeyDictionary()

    def add(self, gradients: dict) -> dict:
        """Gradients by tensor name -> results by tensor name, float32, in the gradients' shapes. Those of row buckets are
        tf.IndexedSlices and so are their results, each row once."""
        graph = tf.compat.v1.get_default_graph()
        order = [graph.get_operation_by_name(self._last_node[graph])] if graph in self._last_node else []
        sent = [nodes.start(gradients, order) for nodes in self._nodes]
        received = [nodes.exchange(array, order, self._process_set)
                    for nodes, array in zip(self._nodes, sent, strict=True)]
        results = {}
        for nodes, array in zip(self._nodes, received, strict=True):
            results.update(nodes.finish(array, order, gradients))
        self._last_node[graph] = order[-1].name
        return results

    def check_idle(self) -> None:
        if any(self.exchange.is_started(bucket) for bucket in self.exchange.buckets):
            self.exchange.abort()
            raise ExchangeError("a step's gradients came before those of the step before were exchanged, because that one "
                                "was interrupted, or because two steps run at a time")

    def guarded(self, function):
        """The function; an error in it gives up the step."""
        def run(*arrays):
            try:
                with scratch_in(self._arrays):
                    result = function(*arrays)
                self.idle_since = time.perf_counter()
                return result
            except BaseException as error:
                self.error = error
                self.exchange.abort()
                raise

        return run

    def call(self, function, inputs, dtypes: list, order: list) -> list[tf.Tensor]:
        """A node that runs function(*arrays) after those before it."""
        with tf.control_dependencies(order):
            results = tf.numpy_function(self.guarded(function), inputs, dtypes)
        order[:] = [results[0].op]
        return results


class _BucketNodes:
    """The nodes of one bucket."""

    def __init__(self, graph: ExchangeGraph, bucket: Bucket, prescale: float):
        self._graph, self._bucket, self._prescale = graph, bucket, prescale
        self._exchange = graph.exchange
        self._is_first = bucket is graph.exchange.buckets[0]
        self._is_last = bucket is graph.exchange.buckets[-1]
        #: Of the inputs of each collective.
        self._dtypes = {"allgather": [tf.uint8], "alltoall": [tf.uint8, tf.int32],
                        "broadcast": [tf.uint8],
                        "allreduce": [tf.as_dtype(bucket.communicator.allreduced(bucket.compressor))]}
        self._collectives = bucket.communicator.collectives_of(graph.exchange.transport)

    def start(self, gradients, order) -> list[tf.Tensor]:
        """Encode: what goes into the first collective."""
        return self._call(self._encode, self._inputs(gradients), self._collectives[0], order)

    def _call(self, function, inputs, collective, order) -> list[tf.Tensor]:
        """The inputs of that collective, from a node that runs function(*arrays)."""
        sent = self._graph.call(function, inputs, self._dtypes[collective], order)
        for tensor in sent:
            tensor.set_shape([None])
        return sent

    def _inputs(self, gradients) -> list[tf.Tensor]:
        return [gradients[tensor.name] for tensor in self._bucket.tensors]

    def exchange(self, sent, order, process_set) -> tf.Tensor:
        """The collectives; returns what came out of the last one."""
        first, *others = self._collectives
        received = _collective(first, sent, self._bucket.name, process_set)
        for number, collective in enumerate(others, 1):
            sent = self._call(self._advance, [received], collective, order)
            received = _collective(collective, sent, f"{self._bucket.name}.{number}", process_set)
        return received

    def finish(self, received, order, gradients) -> dict[str, tf.Tensor]:
        """Decode: results by tensor name."""
        (flat,) = self._graph.call(self._decode, [received], [tf.float32], order)
        flat.set_shape([self._bucket.size])
        return {tensor.name: tf.reshape(part, gradients[tensor.name].shape) for tensor, part
                in zip(self._bucket.tensors, tf.split(flat, self._bucket.sizes), strict=True)}

    # What runs in Python.

    def _encode(self, *arrays) -> list[np.ndarray]:
        if self._is_first:
            self._graph.check_idle()
        self._exchange.start(self._bucket, functools.partial(self._pack, arrays))
        return self._exchange.pending(self._bucket).handle.sent

    def _advance(self, received) -> list[np.ndarray]:
        before = self._exchange.pending(self._bucket).handle
        before.receive(received, self._graph.idle_since)
        self._exchange.advance(self._bucket)
        after = self._exchange.pending(self._bucket).handle
        # A step without a second collective has a node for it all the same.
        return [np.zeros(1, received.dtype)] if after is before else after.sent

    def _decode(self, received) -> list[np.ndarray]:
        out = self._results.take()
        self._finish(received, out)
        return [out]

    def _finish(self, received, out) -> None:
        handle = self._exchange.pending(self._bucket).handle
        if handle.received is None:
            handle.receive(received, self._graph.idle_since)
        self._exchange.finish(self._bucket, out)
        if self._is_last:
            self._exchange.end_step()

    @functools.cached_property
    def _results(self) -> "Results":
        return Results(self._bucket.sizes)

    def _pack(self, arrays, out: np.ndarray) -> None:
        parts = []
        at = 0
        for array in arrays:
            flat, part = array.reshape(-1), out[at:at + array.size]
            parts += [(flat[i:i + _PART], part[i:i + _PART]) for i in range(0, array.size, _PART)]
            at += array.size
        rest = iter(parts)  # that two threads take from

        def copy():
            for array, part in rest:
                to_float32(array, part)
                if self._prescale != 1.0:
                    part *= np.float32(self._prescale)

        helped = self._graph.helper.submit(copy) if len(parts) > len(arrays) else None
        copy()
        if helped:
            helped.result()


class _RowNodes(_BucketNodes):
    """The nodes of a table whose gradient comes as rows."""

    def _inputs(self, gradients):
        slices = gradients[self._bucket.tensors[0].name]
        return [slices.indices, slices.values]

    def finish(self, received, order, gradients):
        rows, values = self._graph.call(self._decode, [received], [tf.int64, tf.float32], order)
        (table,) = self._bucket.tensors
        given = gradients[table.name]
        rows.set_shape([None])
        return {table.name: tf.IndexedSlices(tf.reshape(values, [-1, *table.shape[1:]]), tf.cast(rows, given.indices.dtype))}

    def _decode(self, received):
        out = RowGradient()
        self._finish(received, out)
        return [out.indices, out.values]

    def _pack(self, arrays):
        indices, values = arrays
        return RowGradient(indices, values if self._prescale == 1.0 else values * np.float32(self._prescale))


class Results:
    """Arrays float32[sum of sizes] for results, which TensorFlow reads without a copy: it looks at the arrays themselves,
    and copies tensors that are not aligned."""

    def __init__(self, sizes):
        self._size = sum(sizes)
        self._arrays: list[np.ndarray] = []
        unit = _ALIGNMENT // 4
        starts = np.cumsum([0, *sizes[:-1]])
        aligned = [np.sum(sizes, where=(starts + offset) % unit == 0) for offset in range(unit)]
        self._offset = int(np.argmax(aligned))

    def take(self) -> np.ndarray:
        """One that nobody looks at any more. There are two, for loops that hold a step's gradients until they have the next
        step's; who holds more gets new ones."""
        for i in range(len(self._arrays)):
            if references(self._arrays, i) == _UNUSED:
                return self._arrays[i]
        raw = np.empty(4 * self._size + 2 * _ALIGNMENT, np.uint8)
        start = -raw.ctypes.data % _ALIGNMENT + 4 * self._offset
        array = raw[start:start + 4 * self._size].view(np.float32)
        self._arrays = [*self._arrays[-1:], array]
        return array


def references(arrays: list, i: int) -> int:
    """To arrays[i]: what an array has that is in a list and nowhere else depends on the Python."""
    return sys.getrefcount(arrays[i])


_UNUSED = references([np.empty(0)], 0)


def to_float32(array: np.ndarray, out: np.ndarray) -> None:
    """array: [n] of any floating-point type that TensorFlow has; out: float32[n]."""
    if array.dtype == np.float32:
        out[:] = array
    elif array.dtype.name == "float16":
        fp16_decode(array.view(np.uint16), out)
    elif array.dtype.name == "bfloat16":
        bf16_decode(array.view(np.uint16), out)
    else:
        with np.errstate(over="ignore"):  # a float64 beyond float32 becomes Inf, which the container says
            np.copyto(out, array, casting="same_kind")


def _collective(kind: str, sent: list[tf.Tensor], name: str, process_set) -> tf.Tensor:
    options = {"name": name, "ignore_name_scope": True, "process_set": process_set}
    with tf.device("/cpu:0"):  # where the codecs are
        if kind in ("allgather", "broadcast"):  # in a broadcast only one rank has something
            return hvd.allgather(*sent, **options)
        if kind == "alltoall":
            return hvd.alltoall(*sent, **options)[0]
        return hvd.allreduce(*sent, op=hvd.Sum, **options)
