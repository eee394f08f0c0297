"""An exchange as nodes of a TensorFlow graph.

Each bucket has nodes of its own: see nodes.py. Horovod pairs the operations of the ranks by their names, so ranks may reach
them in any order; the Python parts of a step run one after the other, in the same order on all ranks.
"""

import concurrent.futures
import time
import weakref
from collections.abc import Callable

import numpy as np
import tensorflow as tf

from grace_ext import ExchangeError
from grace_ext._util.scratch import use_scratch
from grace_ext.exchange.buckets import Bucket
from grace_ext.exchange.engine import Exchange
from grace_ext.exchange.row_buckets import RowBucket

from .auto import SwitchedNodes
from .nodes import BucketNodes, RowNodes


class StepOrder:
    """In each graph, the node after which Python parts go on that exchange gradients, or read what the exchange remembers."""

    def __init__(self):
        #: By graph, the node's name. (The node itself would keep its graph alive.)
        self._last_node: weakref.WeakKeyDictionary[tf.Graph, str] = weakref.WeakKeyDictionary()

    def nodes(self) -> list[tf.Operation]:
        """The node in the graph that is being traced, in a list; an empty list if there is none."""
        graph = tf.compat.v1.get_default_graph()
        return [graph.get_operation_by_name(self._last_node[graph])] if graph in self._last_node else []

    def append(self, node: tf.Operation) -> None:
        """A node that comes after those before it."""
        self._last_node[tf.compat.v1.get_default_graph()] = node.name


class ExchangeGraph:
    """Adds the nodes of an exchange's step to the graph that is being traced.

    step_order: of all exchanges that follow each other. on_begin() is called when a step begins, in its first Python part."""

    def __init__(self, exchange: Exchange, process_set, prescale: float, step_order: StepOrder, on_begin: Callable):
        self.exchange = exchange
        self._step_order, self._on_begin = step_order, on_begin
        #: The last error of the Python parts. TensorFlow raises its own with the same text.
        self.error: BaseException | None = None
        self.idle_since = 0.0
        self.process_set = process_set
        self._arrays: dict[str, np.ndarray] = {}  # scratch, the same whichever thread TensorFlow takes
        #: Copies beside TensorFlow's own thread.
        self.helper = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="grace_ext")
        self._nodes = [nodes_of(bucket)(self, bucket, prescale) for bucket in exchange.buckets]

    def add(self, gradients: dict) -> dict:
        """Gradients by tensor name -> results by tensor name, float32, in the gradients' shapes. Those of row buckets are
        tf.IndexedSlices and so are their results, each row once."""
        order = self._step_order.nodes()
        sent = [nodes.start(gradients, order) for nodes in self._nodes]
        received = [nodes.exchange(array, order, self.process_set) for nodes, array in zip(self._nodes, sent, strict=True)]
        results = {}
        for nodes, array in zip(self._nodes, received, strict=True):
            results.update(nodes.finish(array, order, gradients))
        self._step_order.append(order[-1])
        return results

    def begin_step(self) -> None:
        """In the first Python part of a step, before its first bucket."""
        self.check_idle()
        self._on_begin()

    def check_idle(self) -> None:
        if any(self.exchange.is_started(bucket) for bucket in self.exchange.buckets):
            self.exchange.abort()
            raise ExchangeError(
                "a step's gradients came before those of the step before were exchanged, because that one "
                "was interrupted, or because two steps run at a time"
            )

    def guarded(self, function):
        """The function, made so that an error in it gives up the step."""

        def run(*arrays):
            try:
                with use_scratch(self._arrays):
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


def nodes_of(bucket: Bucket) -> type[BucketNodes]:
    if isinstance(bucket, RowBucket):
        return RowNodes
    return SwitchedNodes if bucket.communicator.switches else BucketNodes
