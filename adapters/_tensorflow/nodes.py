"""The nodes of one bucket in a TensorFlow graph: tf.numpy_function that packs and encodes -> Horovod's operation, a node
as well -> tf.numpy_function that decodes.
"""

import functools
import sys

import numpy as np
import tensorflow as tf

from grace_ext.exchange.buckets import Bucket
from grace_ext.exchange.row_buckets import RowGradient

from .._common.floats import to_float32
from .transport import collective

_ALIGNMENT = 64  # bytes; TensorFlow copies what starts elsewhere
_PART = 2**18  # elements that are copied at a time


class BucketNodes:
    """The nodes of one bucket. graph: the ExchangeGraph."""

    def __init__(self, graph, bucket: Bucket, prescale: float):
        self._graph, self._bucket, self._prescale = graph, bucket, prescale
        self._exchange = graph.exchange
        self._is_first = bucket is graph.exchange.buckets[0]
        self._is_last = bucket is graph.exchange.buckets[-1]
        #: Of the inputs of each collective.
        self._dtypes = {
            "allgather": [tf.uint8],
            "alltoall": [tf.uint8, tf.int32],
            "broadcast": [tf.uint8],
            "allreduce": [tf.as_dtype(bucket.communicator.allreduce_dtype(bucket.compressor))],
        }
        self._has_sketch = bucket.memory.sketch_size(len(bucket.tensors)) > 0
        self._collectives = bucket.communicator.collectives_of(graph.exchange.transport)

    def start(self, gradients, order) -> list[tf.Tensor]:
        """Encode: what goes into the first collective, and the memory's sketch behind it, if it has one."""
        dtypes = [tf.uint8] if self._has_sketch else []
        return self._call(self._encode, self._inputs(gradients), self._collectives[0], order, dtypes)

    def _call(self, function, inputs, collective, order, further=()) -> list[tf.Tensor]:
        """The inputs of that collective, from a node that runs function(*arrays). further: the dtypes of further results."""
        sent = self._graph.call(function, inputs, [*self._dtypes[collective], *further], order)
        for tensor in sent:
            tensor.set_shape([None])
        return sent

    def _inputs(self, gradients) -> list[tf.Tensor]:
        return [gradients[tensor.name] for tensor in self._bucket.tensors]

    def exchange(self, sent, order, process_set) -> list[tf.Tensor]:
        """The collectives; returns what came out of the last one, and all ranks' sketches."""
        sketches = []
        if self._has_sketch:
            sketches = [collective("allgather", [sent.pop()], f"{self._bucket.name}.sketch", process_set)]
        first, *others = self._collectives
        received = collective(first, sent, self._bucket.name, process_set)
        for number, kind in enumerate(others, 1):
            sent = self._call(self._advance, [received], kind, order)
            received = collective(kind, sent, f"{self._bucket.name}.{number}", process_set)
        return [received, *sketches]

    def finish(self, received, order, gradients) -> dict[str, tf.Tensor]:
        """Decode: results by tensor name."""
        (flat,) = self._graph.call(self._decode, received, [tf.float32], order)
        flat.set_shape([self._bucket.size])
        return self._by_name(tf.split(flat, self._bucket.sizes), gradients)

    def _by_name(self, parts, gradients) -> dict[str, tf.Tensor]:
        """The parts of a result in the shapes of their gradients."""
        names = [tensor.name for tensor in self._bucket.tensors]
        return {name: tf.reshape(part, gradients[name].shape) for name, part in zip(names, parts, strict=True)}

    # What runs in Python.

    def _encode(self, *arrays) -> list[np.ndarray]:
        if self._is_first:
            self._graph.begin_step()
        self._exchange.start(self._bucket, functools.partial(self._pack, arrays))
        pending = self._exchange.pending(self._bucket)
        return [*pending.handle.sent, *(pending.sketch.sent if self._has_sketch else [])]

    def _advance(self, received) -> list[np.ndarray]:
        before = self._exchange.pending(self._bucket).handle
        before.receive(received, self._graph.idle_since)
        self._exchange.advance(self._bucket)
        after = self._exchange.pending(self._bucket).handle
        # A step without a second collective has a node for it all the same.
        return [np.zeros(1, received.dtype)] if after is before else after.sent

    def _decode(self, received, *sketches) -> list[np.ndarray]:
        out = self._results.unused()
        for sketch in sketches:
            self._exchange.pending(self._bucket).sketch.receive(sketch, self._graph.idle_since)
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
    def _results(self) -> "ResultArrays":
        return ResultArrays(self._bucket.sizes)

    def _pack(self, arrays, out: np.ndarray) -> None:
        parts = []
        at = 0
        for array in arrays:
            flat, part = array.reshape(-1), out[at : at + array.size]
            parts += [(flat[i : i + _PART], part[i : i + _PART]) for i in range(0, array.size, _PART)]
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


class RowNodes(BucketNodes):
    """The nodes of a table whose gradient comes as rows."""

    def _inputs(self, gradients):
        slices = gradients[self._bucket.tensors[0].name]
        return [slices.indices, slices.values]

    def finish(self, received, order, gradients):
        rows, values = self._graph.call(self._decode, received, [tf.int64, tf.float32], order)
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


class ResultArrays:
    """Arrays float32[sum of sizes] for results, which TensorFlow reads without a copy: it looks at the arrays themselves,
    and copies tensors that are not aligned."""

    def __init__(self, sizes):
        self._size = sum(sizes)
        self._arrays: list[np.ndarray] = []
        unit = _ALIGNMENT // 4
        starts = np.cumsum([0, *sizes[:-1]])
        aligned = [np.sum(sizes, where=(starts + offset) % unit == 0) for offset in range(unit)]
        self._offset = int(np.argmax(aligned))

    def unused(self) -> np.ndarray:
        """One that nobody looks at any more. There are two, for loops that hold a step's gradients until they have the next
        step's; who holds more gets new ones."""
        for i in range(len(self._arrays)):
            if references(self._arrays, i) == _UNUSED:
                return self._arrays[i]
        raw = np.empty(4 * self._size + 2 * _ALIGNMENT, np.uint8)
        start = -raw.ctypes.data % _ALIGNMENT + 4 * self._offset
        array = raw[start : start + 4 * self._size].view(np.float32)
        self._arrays = [*self._arrays[-1:], array]
        return array


def references(arrays: list, i: int) -> int:
    """To arrays[i]: what an array has that is in a list and nowhere else depends on the Python."""
    return sys.getrefcount(arrays[i])


_UNUSED = references([np.empty(0)], 0)
