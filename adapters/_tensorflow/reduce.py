"""Gradients of TensorFlow variables through the exchange: in eager code, in tf.function and in Keras' fit."""

import copy
import dataclasses
import functools
import math
from collections.abc import Callable

import horovod.tensorflow as hvd
import tensorflow as tf

# The question whether XLA compiles the code has no public name.
from tensorflow.python.ops.control_flow_util import GraphOrParentsInXlaContext

from grace_ext import ConfigError
from grace_ext.exchange.bucketing import build_buckets
from grace_ext.exchange.buckets import Tensor
from grace_ext.exchange.engine import Exchange
from grace_ext.exchange.scheduler import CallersThread
from grace_ext.exchange.stalls import check_config_digests
from grace_ext.memory import Memory

from .._horovod.exits import guard_exit
from .._horovod.options import group_names, prefix_of
from .eager import gather, has_others
from .exchange_graph import ExchangeGraph, StepOrder
from .following_states import FollowingStates
from .keras_callback import native_variable
from .names import common_names, name_of, unique
from .options import Options
from .saved_state import Restore
from .transport import GraphTransport


class Reducer:
    """Exchanges the gradients of one set of variables, step after step; keeps their memory and their counts.

    Which of the variables have gradients may change. Each set of gradients has a layout; what is remembered of a variable goes
    from one to the next."""

    def __init__(self, options: Options):
        self.options = dataclasses.replace(options)  # with observers of its own, which it shares among its layouts
        #: Whether there is anybody to exchange with.
        self.active = has_others(options.process_set)
        self._layouts: dict[tuple, _Layout] = {}
        self._names: dict[int, str] = {}  # by id of a tf.Variable
        self._memory = copy.deepcopy(options.memory)  # for further layouts: two cannot share a Memory
        self._states = FollowingStates()
        self._order = StepOrder()
        self._current: _Layout | None = None  # the one that was traced last, or run eagerly
        guard_exit(hvd)
        if not self.active:
            options.warn_of_one_rank(stacklevel=3)

    def reduce(self, gradients: list, variables: list, local=()) -> list:
        """Gradients (tf.Tensor, tf.IndexedSlices or None) of the variables, in their order -> the same, averaged over ranks
        (or summed), in the gradients' dtypes. Eagerly or in a graph; call it in the same order on all ranks.

        local: variables whose gradients are not exchanged, but divided by the number of ranks with scale_local_gradients.

        Raises ConfigError for gradients that are not real floating-point numbers, for shapes that are not known, if ranks
        differ in their variables or options, and where XLA compiles the step or TensorFlow 1 builds a graph for a session.
        """
        if not self.active:
            return list(gradients)
        check_not_compiled()
        if local:
            return self._reduce_shared(gradients, variables, {id(native_variable(variable)) for variable in local})
        names = unique([name_of(variable) for variable in variables])
        given = {
            name: self._checked(name, gradient, variable)
            for name, gradient, variable in zip(names, gradients, variables, strict=True)
            if gradient is not None
        }
        if not given:
            return list(gradients)
        layout = self._current = self._layout(given, dict(zip(names, variables, strict=True)))
        reduced = layout.run_eagerly(given) if tf.executing_eagerly() else layout.graph.add(given)
        return [_like(gradient, reduced.get(name)) for name, gradient in zip(names, gradients, strict=True)]

    def _reduce_shared(self, gradients, variables, local: set[int]) -> list:
        """Only those that are not local."""
        shared = [i for i, variable in enumerate(variables) if id(native_variable(variable)) not in local]
        reduced = self.reduce([gradients[i] for i in shared], [variables[i] for i in shared])
        scale = 1 / self.options.process_set.size() if self.options.scale_local_gradients else 1.0
        result = [scaled(gradient, scale) for gradient in gradients]
        for i, gradient in zip(shared, reduced, strict=True):
            result[i] = gradient
        return result

    def _checked(self, name, gradient, variable):
        if isinstance(gradient, tf.IndexedSlices):
            dense = self.options.sparse_as_dense
            shape = tf.constant(tuple(variable.shape)) if dense else None  # a TensorShape cannot become a node of a graph
            gradient = tf.IndexedSlices(gradient.values, gradient.indices, shape)
            gradient = tf.convert_to_tensor(gradient) if dense else gradient
        if not gradient.dtype.is_floating:
            raise ConfigError(f"the gradient of {name!r} is {gradient.dtype.name}; gradients must be real floating point")
        return gradient

    @tf.autograph.experimental.do_not_convert
    def _layout(self, given: dict, variables: dict) -> "_Layout":
        tables = {name for name, gradient in given.items() if isinstance(gradient, tf.IndexedSlices)}
        key = tuple((name, gradient.dtype, name in tables or tuple(gradient.shape)) for name, gradient in given.items())
        for name, variable in variables.items():  # each time, since variables may be made anew
            self._names[id(native_variable(variable))] = name
        if key not in self._layouts:
            common = dict(zip(variables, common_names(list(variables)), strict=True))
            tensors = [_tensor(name, gradient, variables[name], common[name]) for name, gradient in given.items()]
            with tf.init_scope():
                float32 = {name for name, gradient in given.items() if gradient.dtype == tf.float32}
                by_id = {id(variable): name for name, variable in variables.items()}
                options = self.options
                if self._layouts:
                    options = dataclasses.replace(options, memory=copy.deepcopy(self._memory))
                layout = _Layout(options, tensors, tables, float32, by_id, self._order, self._begin)
            self._states.add(layout.exchange, layout.names, list(variables))
            self._layouts[key] = layout
        return self._layouts[key]

    def _begin(self, exchange: Exchange) -> None:
        """A step of one of the layouts begins."""
        for layout in self._layouts.values():
            layout.graph.check_idle()
        self._states.begin(exchange)

    def state_dict(self) -> dict:
        """This rank's state between two steps: see saved_state."""
        if not self.active:
            return {"rank": 0, "ranks": 1, "layouts": []}
        process_set = self.options.process_set
        rank, ranks = process_set.rank(), process_set.size()
        return {"rank": rank, "ranks": ranks, "layouts": self._states.state_dict(rank, ranks)}

    def load_state_dict(self, states, on_resize=None) -> dict | None:
        """A collective: go on from what state_dict returned, on all ranks, now or in the first step. See Restore. Returns
        this rank's "passes", if all ranks can go on with theirs."""
        if not self.active:
            return states["passes"] if isinstance(states, dict) and states["ranks"] == 1 and "passes" in states else None
        restore = Restore(states, self.options.process_set, on_resize)
        self._states.load(restore)
        return restore.passes

    def memory_of(self, variable) -> tuple[Memory, Tensor] | None:
        """The memory of a tf.Variable whose gradient was exchanged by the last `reduce`, and what it knows the variable as; None
        of others. For a variable of Keras 3 it is the tf.Variable inside, which is what its optimizers update."""
        return None if self._current is None else self._current.memories.get(self._names.get(id(variable)))

    def read_memory(self, function, inputs: list, dtypes: list) -> list[tf.Tensor]:
        """function(*arrays), which reads a memory, once the exchange of the step is over and before the next one begins."""
        if tf.executing_eagerly():
            return tf.numpy_function(function, inputs, dtypes)
        with tf.control_dependencies(self._order.nodes()):
            results = tf.numpy_function(function, inputs, dtypes)
        self._order.append(results[0].op)
        return results

    def stats(self) -> dict:
        """See grace_ext.exchange.Exchange.stats; {"steps": 0} before the first exchange and when there is one rank."""
        if not self._layouts:
            return {"steps": 0}
        last, *others = sorted(self._layouts.values(), key=lambda layout: layout.graph.idle_since, reverse=True)
        return last.exchange.stats(*(layout.exchange for layout in others))


class _Layout:
    """The buckets of certain gradients, in the reverse order of their variables: about that in which backward makes them."""

    def __init__(
        self,
        options: Options,
        tensors: list[Tensor],
        tables: set[str],
        float32: set[str],
        names: dict[int, str],
        step_order: StepOrder,
        on_begin: Callable[[Exchange], None],
    ):
        """tables: the names of those whose gradients come as rows; each has a bucket of its own. float32: of those with
        gradients of that dtype. names: by id of the variable. step_order, on_begin: see ExchangeGraph."""
        process_set = options.process_set
        self.names = [tensor.name for tensor in tensors]
        self.exchange = options.make_exchange(GraphTransport(process_set), executor=CallersThread())
        buckets = build_buckets(
            self.exchange,
            [tensors[::-1]],
            tables,
            options.make_rules(),
            options.make_communicator(),
            prefix_of(process_set),
            options.largest_bucket,
            group_names(options.groups, names),
        )
        self.exchange.set_buckets(buckets)
        for bucket in self.exchange.buckets:
            bucket.may_bypass = float32.issuperset(tensor.name for tensor in bucket.tensors)
        self.memories = {
            tensor.name: (bucket.memory, tensor) for bucket in self.exchange.buckets for tensor in bucket.tensors
        }
        check_config_digests(self.exchange, lambda digest: gather(digest, process_set))
        self.graph = ExchangeGraph(
            self.exchange, process_set, options.prescale, step_order, functools.partial(on_begin, self.exchange)
        )
        self._function = None

    def run_eagerly(self, given: dict) -> dict:
        """As a graph as well: there Horovod's operations have names and overlap."""
        if self._function is None:
            self._function = tf.function(self.graph.add).get_concrete_function(
                {name: _spec(gradient) for name, gradient in given.items()}
            )
        self.graph.error = None
        try:
            return self._function(given)
        except tf.errors.OpError:
            if self.graph.error is not None:
                raise self.graph.error from None
            raise


def check_not_compiled() -> None:
    """Raises ConfigError inside a function that XLA compiles, because a compiled step can call neither Horovod nor the
    codecs, and without eager execution, which the first step needs."""
    if not tf.compat.v1.executing_eagerly_outside_functions():
        raise ConfigError("sessions of TensorFlow 1 are not supported: leave eager execution enabled")
    if not tf.executing_eagerly() and GraphOrParentsInXlaContext(tf.compat.v1.get_default_graph()):
        raise ConfigError(
            "XLA compiles this training step, and a compiled step cannot exchange gradients: switch it off "
            "with model.compile(..., jit_compile=False) (Keras 3 compiles by itself on a GPU: "
            "jit_compile='auto'), or in your own loop with @tf.function(jit_compile=False)"
        )


def _tensor(name: str, gradient, variable, common_name: str) -> Tensor:
    shape = variable.shape if isinstance(gradient, tf.IndexedSlices) else gradient.shape
    if not tf.TensorShape(shape).is_fully_defined():
        raise ConfigError(f"the gradient of {name!r} has the shape {shape}; it must be fully known")
    return Tensor(name, math.prod(shape), len(shape), shape=tuple(shape), common_name=common_name)


def _spec(gradient):
    if isinstance(gradient, tf.IndexedSlices):
        return tf.IndexedSlicesSpec(dtype=gradient.dtype, indices_dtype=gradient.indices.dtype)
    return tf.TensorSpec(gradient.shape, gradient.dtype)


def _like(gradient, reduced):
    """The result in the gradient's dtype."""
    if isinstance(reduced, tf.IndexedSlices):
        return tf.IndexedSlices(tf.cast(reduced.values, gradient.dtype), reduced.indices, gradient.dense_shape)
    return None if gradient is None else tf.cast(reduced, gradient.dtype)


def scaled(gradient, factor):
    """A gradient (None, tf.Tensor or tf.IndexedSlices) times a factor."""
    if gradient is None:
        return None
    if isinstance(gradient, tf.IndexedSlices):
        return tf.IndexedSlices(scaled(gradient.values, factor), gradient.indices, gradient.dense_shape)
    return gradient * tf.cast(factor, gradient.dtype)
