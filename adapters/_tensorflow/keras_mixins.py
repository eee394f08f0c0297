"""What wrapped Keras optimizers do differently: those of Keras 3 on TensorFlow, of tf_keras, and its legacy ones.

An optimizer is wrapped in place, by giving the object a class of its own below its old one. A copy would not do: Keras
makes an optimizer's variables at its first step, so two objects that share state would each make theirs; and models,
checkpoints and LossScaleOptimizers that hold the optimizer already would go on with the other one.
"""

import sys

import tensorflow as tf

from grace_ext import ConfigError
from grace_ext.exchange.buckets import Tensor
from grace_ext.memory import Memory

from .._common.subclassing import subclass
from .accumulator import Accumulator
from .reduce import Reducer, scaled


class WrappedState:
    """What belongs to one wrapped optimizer. It is an attribute of the class, where neither Keras nor tf.train.Checkpoint
    looks for what to save."""

    def __init__(self, reducer: Reducer, accumulator: Accumulator, has_memory: bool):
        self.reducer, self.accumulator = reducer, accumulator
        #: Then a changing loss scale must not reach the Reducer. Without a memory it helps small numbers through float16.
        self.unscales = has_memory and reducer.active
        self.local: list = []
        #: Keras 3, gradient_accumulation_steps: the variables of the gradients that are being applied.
        self.variables: list = []

    def exchange(self, gradients, variables) -> list:
        if not self.reducer.active:
            return list(gradients)
        if tf.distribute.has_strategy():
            raise ConfigError("inside a tf.distribute strategy every replica would exchange for itself; leave either out")
        if any(getattr(variable, "overwrite_with_gradient", False) for variable in variables):
            raise ConfigError("float8: its scales are not gradients and cannot be averaged like them")
        return self.reducer.reduce(list(gradients), list(variables), self.local)


class _Common:
    """Every wrapped optimizer has these."""

    def compression_stats(self):
        """Bytes, ratio and seconds per stage, in total and of the last step.

        Returns:
            What docs/observability.md describes.
        """
        return self._grace.reducer.stats()

    def compression_state(self) -> dict:
        """This rank's state, for each rank to save between two steps; the optimizer's own variables are not in it.

        Returns:
            A dict of numpy arrays, numbers and strings, with "rank" and "ranks" in it: what the memories hold, the number of
            the step, and what backward_passes_per_step has summed since the last exchange.
        """
        state = self._grace.reducer.state_dict()
        passes = self._grace.accumulator.state_dict()
        return {**state, "passes": passes} if passes else state

    def load_compression_state(self, state, on_resize=None) -> None:
        """Go on from what compression_state returned. Call it on all ranks, before the first step or later.

        Args:
            state: This rank's own state, or a list of all ranks' states, whose number may differ from that of the ranks now;
                None on a rank that has none.
            on_resize: For states of another number of ranks: "reset", memories start from zero; "redistribute", each rank
                takes an equal part of the sum of residuals; None: redistribute if the states of all ranks were given. The log
                "grace_ext" says what was done. Sums of backward passes are dropped then.

        Raises:
            ConfigError: The states do not fit together or to the variables. Raised here or in the first step.
        """
        self._grace.accumulator.load_state_dict(self._grace.reducer.load_state_dict(state, on_resize))

    def register_local_var(self, var):
        """Leave a variable's gradient out of the exchange, as in Horovod.

        Args:
            var: The variable.
        """
        self._grace.local.append(var)

    def __reduce_ex__(self, protocol):
        # A copy is a plain optimizer: two cannot exchange through one Reducer.
        reduced = self._plain.__reduce_ex__(self, protocol)
        make, arguments, *others = reduced
        if getattr(make, "__self__", None) is type(self):  # Keras 3: a class method
            make = getattr(self._plain, make.__name__)
        return make, tuple(self._plain if item is type(self) else item for item in arguments), *others


class _MomentsInMemory:
    def update_step(self, gradient, variable, *learning_rate):
        """Update a variable as the plain optimizer does, but for what its memory keeps of Adam's moments."""
        reducer = self._grace.reducer
        memory, tensor = reducer.memory_of(variable) or (None, None)
        if memory is not None and memory.needs_step:
            rate = learning_rate[0] if learning_rate else self.learning_rate
            if memory.keeps_moments:
                direction, roots = _moments(memory, tensor, gradient, reducer)
            else:
                direction, roots = gradient, _roots(memory, tensor, gradient, rate, reducer)
            step = direction / (roots + tf.cast(self.epsilon, gradient.dtype))
            variable.assign_sub(tf.cast(tf.cast(rate, step.dtype) * step, variable.dtype))
            return
        if memory is None or memory.first_moment is None or not getattr(self, "beta_1", 0.0):
            self._plain.update_step(self, gradient, variable, *learning_rate)
            return
        beta = self.beta_1
        object.__setattr__(self, "beta_1", 0.0)
        try:
            self._plain.update_step(self, gradient, variable, *learning_rate)
        finally:
            object.__setattr__(self, "beta_1", beta)


def _roots(memory: Memory, tensor: Tensor, gradient, rate, reducer: Reducer):
    """The roots of a variable's second moments, in its shape, once the exchange of the step is over."""

    def denominator(array, rate):
        return memory.denominator(tensor, lambda position: array.flat[position], float(rate))

    rows, columns = reducer.read_memory(denominator, [gradient, rate], [tf.float32, tf.float32])
    shape = [*gradient.shape] or [1]
    roots = tf.reshape(rows, [shape[0], *[1] * (len(shape) - 1)]) * tf.reshape(columns, [1, *shape[1:]])
    return tf.cast(tf.reshape(roots, gradient.shape), gradient.dtype)


def _moments(memory: Memory, tensor: Tensor, gradient, reducer: Reducer):
    """Both moments of a variable, in its shape, once the exchange of the step is over."""

    def moments(array):
        return memory.moments(tensor, array.reshape(-1))

    found = reducer.read_memory(moments, [tf.cast(gradient, tf.float32)], [tf.float32, tf.float32])
    return [tf.cast(tf.reshape(one, gradient.shape), gradient.dtype) for one in found]


class _Keras3:
    @tf.autograph.experimental.do_not_convert
    def apply(self, grads, trainable_variables=None):
        """Exchange the gradients, then apply them as the plain optimizer does."""
        state, plain = self._grace, self._plain
        variables = self._trainable_variables if trainable_variables is None else list(trainable_variables)
        grads = list(grads)
        if len(grads) != len(variables) or not grads:
            return plain.apply(self, grads, trainable_variables)  # which says what is wrong
        if not self.built:
            self.build(variables)
        if accumulates(self):
            state.variables = [variable for variable, gradient in zip(variables, grads, strict=True) if gradient is not None]
            return plain.apply(self, grads, variables)

        def apply_exchanged(gradients, variables):
            scale = getattr(self, "dynamic_scale", None)  # of a LossScaleOptimizer
            if scale is not None and state.unscales:
                gradients = [scaled(gradient, 1 / scale) for gradient in gradients]
                gradients = [scaled(gradient, scale) for gradient in state.exchange(gradients, variables)]
            else:
                gradients = state.exchange(gradients, variables)
            plain.apply(self, gradients, variables)

        state.accumulator.call(grads, variables, apply_exchanged, lambda: _count(self))

    def _clip_gradients(self, grads):
        # Keras calls it with what it accumulated, at the calls that update variables.
        if accumulates(self):
            grads = self._grace.exchange(grads, self._grace.variables)
        return self._plain._clip_gradients(self, grads)

    def __setattr__(self, name, value):
        if name == "loss_scale_factor" and value is None:  # the constructors of those optimizers do this
            raise ConfigError(
                "a LossScaleOptimizer or MultiOptimizer cannot hold a DistributedOptimizer: ranks would skip "
                "steps apart. Wrap the outermost: "
                "DistributedOptimizer(keras.optimizers.LossScaleOptimizer(optimizer)). Under the policy "
                "mixed_float16 model.compile puts other optimizers into a LossScaleOptimizer, so give it one"
            )
        self._plain.__setattr__(self, name, value)


class _TfKeras:
    def aggregate_gradients(self, grads_and_vars):
        """Exchange the gradients; apply_gradients calls it, unless told that they are aggregated already."""
        return _aggregate(self, self._plain.aggregate_gradients(self, grads_and_vars))


class _TfKerasLegacy:
    def _aggregate_gradients(self, grads_and_vars):
        return _aggregate(self, self._plain._aggregate_gradients(self, grads_and_vars))


class _TfKerasPasses:
    @tf.autograph.experimental.do_not_convert
    def apply_gradients(self, grads_and_vars, *args, **kwargs):
        """As the plain optimizer's; at every backward_passes_per_step-th call only, with what came since."""
        state, plain = self._grace, self._plain
        grads_and_vars = list(grads_and_vars)
        if state.accumulator.passes == 1 or not grads_and_vars:
            return plain.apply_gradients(self, grads_and_vars, *args, **kwargs)
        if kwargs.get("skip_gradients_aggregation") or not kwargs.get("experimental_aggregate_gradients", True):
            raise ConfigError(
                "backward_passes_per_step: the gradients must not be aggregated before. With a "
                "LossScaleOptimizer write "
                "DistributedOptimizer(LossScaleOptimizer(optimizer), backward_passes_per_step=...)"
            )
        grads, variables = zip(*grads_and_vars, strict=True)
        with tf.init_scope():
            inner = getattr(self, "inner_optimizer", self)
            inner.build(variables) if hasattr(inner, "build") else inner._create_all_weights(variables)
        state.accumulator.call(
            grads,
            variables,
            lambda gradients, of: plain.apply_gradients(self, list(zip(gradients, of, strict=True)), *args, **kwargs),
            lambda: _count(self),
        )
        return self.iterations


KERAS_3 = (_Keras3, _MomentsInMemory)
TF_KERAS = (_TfKeras, _TfKerasPasses, _MomentsInMemory)
TF_KERAS_LEGACY = (_TfKerasLegacy, _TfKerasPasses)


def mixins_for(optimizer) -> tuple:
    """By the methods that an optimizer has: `keras` was Keras 2 before TensorFlow 2.16."""
    on_tensorflow = isinstance(optimizer, tf.__internal__.tracking.Trackable)
    if hasattr(optimizer, "stateless_apply") and not (on_tensorflow or isinstance(optimizer, type)):
        backend = sys.modules["keras"].backend.backend()
        raise ConfigError(f"Keras runs on the backend {backend!r}; this adapter needs KERAS_BACKEND=tensorflow")
    for method, mixins in (
        ("stateless_apply", KERAS_3),
        ("aggregate_gradients", TF_KERAS),
        ("_aggregate_gradients", TF_KERAS_LEGACY),
    ):
        if on_tensorflow and hasattr(optimizer, method):
            return mixins
    raise ConfigError(f"optimizer: an optimizer of keras or tf_keras is expected, not {optimizer!r}")


def attach(optimizer, state: WrappedState, *mixins: type) -> None:
    """Give the object a class of its own below its old one, with what the mixins do differently."""
    plain = type(optimizer)
    methods = {
        "_grace": state,
        # Whoever asks an object for its class, to write down its name in a file, hears the plain one.
        "__class__": property(lambda self: plain),
        "from_config": plain.from_config,
    }
    object.__setattr__(optimizer, "__class__", subclass(plain, _Common, *mixins, **methods))


def is_wrapped(optimizer) -> bool:
    return hasattr(type(optimizer), "_grace")


def _aggregate(optimizer, grads_and_vars) -> list:
    grads_and_vars = list(grads_and_vars)
    if not grads_and_vars:
        return []
    grads, variables = zip(*grads_and_vars, strict=True)
    return list(zip(optimizer._grace.exchange(grads, variables), variables, strict=True))


def accumulates(optimizer) -> bool:
    """Whether Keras 3 (since 3.1) sums gradients over calls by itself."""
    return bool(getattr(optimizer, "gradient_accumulation_steps", None))


def _count(optimizer) -> None:
    """A call that updates no variable counts in `iterations` all the same, as in Horovod."""
    for inner in getattr(optimizer, "optimizers", ()):  # of a MultiOptimizer
        _count(inner)
    optimizer.iterations.assign_add(1)
