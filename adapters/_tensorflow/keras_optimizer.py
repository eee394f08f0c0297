"""Keras optimizers whose gradients go through a Reducer: Keras 3 on TensorFlow, tf_keras, and its legacy optimizers.

An optimizer is wrapped in place, by giving the object a class of its own below its old one. A copy would not do: Keras
makes an optimizer's variables at its first step, so two objects that share state would each make theirs; and models,
checkpoints and LossScaleOptimizers that hold the optimizer already would go on with the other one.
"""

import sys

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf

from grace_ext import ConfigError
from grace_ext.policy import DEFAULT_SPEC
from grace_ext.policy.memories import Memories

from .accumulator import Accumulator
from .reduce import Options, Reducer, check_devices


def DistributedOptimizer(
    optimizer,
    name=None,
    device_dense="",
    device_sparse="",
    compression=DEFAULT_SPEC,
    sparse_as_dense=False,
    gradient_predivide_factor=1.0,
    op=hvd.Average,
    backward_passes_per_step=1,
    average_aggregated_gradients=False,
    num_groups=0,
    groups=None,
    process_set=hvd.global_process_set,
    scale_local_gradients=True,
    *,
    memory="residual",
    communicator="allgather",
    rules=None,
    bucket_bytes=25 * 2**20,
    seed=0,
    capture=None,
    schedule=None,
    observe=None,
):
    """Wrap a Keras optimizer so that gradients are compressed, exchanged and averaged over ranks before they are applied.

    A drop-in for horovod.tensorflow.keras.DistributedOptimizer: the arguments up to scale_local_gradients are Horovod's,
    in its order. Takes optimizers of Keras 3 (on TensorFlow), of tf_keras and of tf_keras.optimizers.legacy, and each one's
    LossScaleOptimizer. Returns the given object, which keeps its class, its variables and its learning-rate schedule; what
    is saved of it loads without grace_ext, as the plain optimizer. Works in model.fit, in apply, apply_gradients and
    minimize, eagerly and in tf.function. A model that was trained with the optimizer before must be compiled again.

    name: a new name for the optimizer.
    compression, memory, communicator, rules, bucket_bytes, groups, seed, capture, schedule, observe: as in horovod_torch's
        DistributedOptimizer. Buckets follow the reverse order of the variables.
    sparse_as_dense: tf.IndexedSlices are made dense first.
    backward_passes_per_step: gradients are summed over so many calls, then exchanged and applied; the calls between change
        no weight and count in `iterations`. average_aggregated_gradients: divide the sum by their number.
        gradient_accumulation_steps of a Keras 3 optimizer is honoured too: what Keras accumulated is exchanged (under a
        LossScaleOptimizer every call's gradients are).
    scale_local_gradients: gradients of variables that `register_local_var` excludes from the exchange are divided by the
        number of ranks.

    With a LossScaleOptimizer a non-finite gradient on one rank makes all ranks skip the step. Wrap it from outside; only in
    tf_keras, whose LossScaleOptimizer is made for this, it can hold a wrapped optimizer too (without backward passes).
    tf_keras: apply_gradients(..., skip_gradients_aggregation=True) does not exchange; nor does, on a legacy optimizer,
    experimental_aggregate_gradients=False.

    Raises ConfigError for what cannot be honoured: op=Adasum, devices, Keras on another backend, optimizers that are wrapped
    already, memory "dgc" for an optimizer with a momentum of its own, specs that differ between ranks, tf.distribute,
    float8, and while tracing for jit_compile=True.
    """
    check_devices(device_dense, device_sparse)
    if backward_passes_per_step < 1:
        raise ConfigError(f"backward_passes_per_step={backward_passes_per_step}; allowed: 1 and more")
    options = Options(
        compression,
        memory,
        communicator,
        rules,
        bucket_bytes,
        groups or num_groups,
        op,
        gradient_predivide_factor,
        sparse_as_dense,
        process_set,
        scale_local_gradients,
        seed,
        capture,
        schedule,
        observe,
    )
    hooks = _hooks(optimizer)
    inner = getattr(optimizer, "inner_optimizer", optimizer)  # of a LossScaleOptimizer
    if any(hasattr(type(wrapped), "_grace") for wrapped in (optimizer, inner)):
        raise ConfigError(f"this {type(optimizer).__name__} is wrapped by DistributedOptimizer already")
    if backward_passes_per_step > 1 and _accumulates(inner):
        raise ConfigError("backward_passes_per_step and the optimizer's own gradient_accumulation_steps: give one of them")
    if getattr(inner, "_mesh", None):
        raise ConfigError("an optimizer with a DTensor mesh exchanges its gradients itself")
    if name:
        setattr(inner, "_name" if hooks is _TF_KERAS_LEGACY else "name", name)
    if any(map(_has_momentum, (inner, *getattr(inner, "optimizers", ())))):
        for memory in Memories(options.memory).all():
            if memory.applies_momentum:
                raise ConfigError(
                    f"memory {str(memory)!r} applies the momentum before gradients are compressed: use "
                    f"for example keras.optimizers.SGD with momentum=0"
                )
    state = _State(
        Reducer(options),
        Accumulator(backward_passes_per_step, average_aggregated_gradients, sparse_as_dense),
        options.memory != "none",
    )
    if hooks is _KERAS_3 or inner is optimizer:
        _subclass(optimizer, state, *hooks)
    else:  # tf_keras' LossScaleOptimizer lets the inner optimizer exchange, before it decides whether to skip the step
        exchange, *others = hooks
        _subclass(inner, state, exchange)
        _subclass(optimizer, state, *others)
    return optimizer


def load_model(filepath, custom_objects=None, *, keras=None, **options):
    """Load a model that was saved with its optimizer, wrapped or plain, and wrap the optimizer: training goes on.

    keras: the module that loads, keras or tf_keras; without it, tf.keras. options: of DistributedOptimizer.

    Raises ConfigError if the file has no optimizer.
    """
    model = (keras or tf.keras).models.load_model(filepath, custom_objects=custom_objects)
    if getattr(model, "optimizer", None) is None:
        raise ConfigError(f"{filepath}: the model was saved without an optimizer; compile it with a DistributedOptimizer")
    DistributedOptimizer(model.optimizer, **options)
    return model


class _State:
    """What belongs to one wrapped optimizer. It hangs on the class, where neither Keras nor tf.train.Checkpoint looks for
    what to save."""

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
        """Bytes, ratio and seconds per stage, in total and of the last step: see grace_ext.exchange.Exchange.stats."""
        return self._grace.reducer.stats()

    def compression_state(self) -> dict:
        """This rank's state: what the memories hold, the number of the step, and what backward_passes_per_step has summed
        since the last exchange. A dict of numpy arrays, numbers and strings, with "rank" and "ranks" in it. For each rank to
        save between two steps; the optimizer's own variables are not in it."""
        state = self._grace.reducer.state_dict()
        passes = self._grace.accumulator.state_dict()
        return {**state, "passes": passes} if passes else state

    def load_compression_state(self, state, on_resize=None) -> None:
        """Go on from what compression_state returned. Call it on all ranks, before the first step or later.

        state: this rank's own; a list of all ranks' if there are as many ranks as there were, or others; None on a rank that
            has none.
        on_resize: for states of another number of ranks. "reset": memories start from zero; "redistribute": each rank takes
            an equal part of the sum of residuals; None: redistribute if the states of all ranks were given. The log
            "grace_ext" says what was done. Sums of backward passes are dropped then.

        Raises ConfigError, here or in the first step, for states that do not fit together or to the variables.
        """
        self._grace.accumulator.load_state_dict(self._grace.reducer.load_state_dict(state, on_resize))

    def register_local_var(self, var):
        """The gradient of this variable is not exchanged, as in Horovod."""
        self._grace.local.append(var)

    def __reduce_ex__(self, protocol):
        # A copy is a plain optimizer: two cannot exchange through one Reducer.
        reduced = self._plain.__reduce_ex__(self, protocol)
        make, arguments, *others = reduced
        if getattr(make, "__self__", None) is type(self):  # Keras 3: a class method
            make = getattr(self._plain, make.__name__)
        return make, tuple(self._plain if item is type(self) else item for item in arguments), *others


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
        if _accumulates(self):
            state.variables = [variable for variable, gradient in zip(variables, grads, strict=True) if gradient is not None]
            return plain.apply(self, grads, variables)

        def apply_exchanged(gradients):
            scale = getattr(self, "dynamic_scale", None)  # of a LossScaleOptimizer
            if scale is not None and state.unscales:
                gradients = [_times(gradient, 1 / scale) for gradient in gradients]
                gradients = [_times(gradient, scale) for gradient in state.exchange(gradients, variables)]
            else:
                gradients = state.exchange(gradients, variables)
            plain.apply(self, gradients, variables)

        state.accumulator.call(grads, variables, apply_exchanged, lambda: _count(self))

    def _clip_gradients(self, grads):
        # Keras calls it with what it accumulated, at the calls that update variables.
        if _accumulates(self):
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
            lambda gradients: plain.apply_gradients(self, list(zip(gradients, variables, strict=True)), *args, **kwargs),
            lambda: _count(self),
        )
        return self.iterations


_KERAS_3 = (_Keras3,)
_TF_KERAS = (_TfKeras, _TfKerasPasses)
_TF_KERAS_LEGACY = (_TfKerasLegacy, _TfKerasPasses)


def _hooks(optimizer) -> tuple:
    """By the methods that an optimizer has: `keras` was Keras 2 before TensorFlow 2.16."""
    on_tensorflow = isinstance(optimizer, tf.__internal__.tracking.Trackable)
    if hasattr(optimizer, "stateless_apply") and not (on_tensorflow or isinstance(optimizer, type)):
        backend = sys.modules["keras"].backend.backend()
        raise ConfigError(f"Keras runs on the backend {backend!r}; this adapter needs KERAS_BACKEND=tensorflow")
    for method, hooks in (
        ("stateless_apply", _KERAS_3),
        ("aggregate_gradients", _TF_KERAS),
        ("_aggregate_gradients", _TF_KERAS_LEGACY),
    ):
        if on_tensorflow and hasattr(optimizer, method):
            return hooks
    raise ConfigError(f"optimizer: an optimizer of keras or tf_keras is expected, not {optimizer!r}")


def _subclass(optimizer, state: _State, *hooks) -> None:
    plain = type(optimizer)
    methods = {
        name: method
        for hook in (_Common, *hooks)
        for name, method in vars(hook).items()
        if name not in ("__module__", "__dict__", "__weakref__", "__doc__")
    }
    namespace = {
        **methods,
        "_grace": state,
        "_plain": plain,
        "__module__": plain.__module__,
        "__doc__": plain.__doc__,
        # Whoever asks an object for its class, to write down its name in a file, hears the plain one.
        "__class__": property(lambda self: plain),
        "from_config": plain.from_config,
    }
    object.__setattr__(optimizer, "__class__", type(plain)(plain.__name__, (plain,), namespace))


def _aggregate(optimizer, grads_and_vars) -> list:
    grads_and_vars = list(grads_and_vars)
    if not grads_and_vars:
        return []
    grads, variables = zip(*grads_and_vars, strict=True)
    return list(zip(optimizer._grace.exchange(grads, variables), variables, strict=True))


def _has_momentum(optimizer) -> bool:
    found = [getattr(optimizer, name, None) for name in ("momentum", "beta_1")]  # Adam's is one, too
    return any(callable(one) or float(np.asarray(one)) for one in found if one is not None)


def _accumulates(optimizer) -> bool:
    """Whether Keras 3 (since 3.1) sums gradients over calls by itself."""
    return bool(getattr(optimizer, "gradient_accumulation_steps", None))


def _count(optimizer) -> None:
    """A call that updates no variable counts in `iterations` all the same, as in Horovod."""
    for inner in getattr(optimizer, "optimizers", ()):  # of a MultiOptimizer
        _count(inner)
    optimizer.iterations.assign_add(1)


def _times(gradient, factor):
    if gradient is None:
        return None
    if isinstance(gradient, tf.IndexedSlices):
        return tf.IndexedSlices(_times(gradient.values, factor), gradient.indices, gradient.dense_shape)
    return gradient * tf.cast(factor, gradient.dtype)
