"""The Keras optimizer whose gradients are compressed and averaged over ranks, and models that are loaded with it."""

import math
import os
from types import ModuleType
from typing import Any

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf

from grace_ext import ConfigError
from grace_ext.memory import Memory
from grace_ext.pipeline.compressor import Compressor
from grace_ext.policy.memories import DEFAULT_MEMORY, Memories

from .accumulator import Accumulator
from .keras_mixins import KERAS_3, TF_KERAS_LEGACY, WrappedState, accumulates, attach, is_wrapped, mixins_for
from .options import Options
from .reduce import Reducer


def DistributedOptimizer(
    optimizer: Any,
    name: str | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: str | dict | Compressor | type | None = None,
    sparse_as_dense: bool = False,
    gradient_predivide_factor: float = 1.0,
    op: int = hvd.Average,
    backward_passes_per_step: int = 1,
    average_aggregated_gradients: bool = False,
    num_groups: int = 0,
    groups: list | int | None = None,
    process_set: hvd.ProcessSet = hvd.global_process_set,
    scale_local_gradients: bool = True,
    **options: Any,
) -> Any:
    """Wrap a Keras optimizer so that gradients are compressed, exchanged and averaged over ranks before they are applied.

    A drop-in for horovod.tensorflow.keras.DistributedOptimizer: the named arguments are Horovod's, in its order, the others
    those of CompressionOptions. Takes optimizers of Keras 3 (on TensorFlow), of tf_keras and of tf_keras.optimizers.legacy,
    and each one's LossScaleOptimizer. Works in model.fit, in apply, apply_gradients and minimize, eagerly and in
    tf.function. A model that was trained with the optimizer before must be compiled again. Buckets follow the reverse order
    of the variables.

    With a LossScaleOptimizer a non-finite gradient on one rank makes all ranks skip the step. Wrap it from outside; only in
    tf_keras, whose LossScaleOptimizer is made for this, it can hold a wrapped optimizer too (without backward passes).
    tf_keras: apply_gradients(..., skip_gradients_aggregation=True) does not exchange; nor does, on a legacy optimizer,
    experimental_aggregate_gradients=False.

    gradient_accumulation_steps of a Keras 3 optimizer is honoured: what Keras accumulated is exchanged (under a
    LossScaleOptimizer every call's gradients are).

    Args:
        optimizer: The optimizer to wrap, in place.
        name: A new name for the optimizer.
        device_dense: Only "" is allowed, because the codecs run on the host.
        device_sparse: The same.
        compression: See CompressionOptions.
        sparse_as_dense: tf.IndexedSlices are made dense first.
        gradient_predivide_factor: With hvd.Average, gradients are divided by this before the sum, and by the rest of the
            number of ranks after it.
        op: hvd.Average or hvd.Sum.
        backward_passes_per_step: Gradients are summed over this many calls, then exchanged and applied; the calls between
            change no weight and count in `iterations`.
        average_aggregated_gradients: Divide the sum by the number of calls.
        num_groups: A number of equal groups, if `groups` is not given.
        groups: See CompressionOptions.
        process_set: The ranks that exchange gradients.
        scale_local_gradients: Gradients of variables that `register_local_var` excludes from the exchange are divided by
            the number of ranks.
        **options: All others of CompressionOptions.

    Returns:
        The given object, which keeps its class, its variables and its learning-rate schedule; what is saved of it loads
        without grace_ext, as the plain optimizer.

    Raises:
        ConfigError: Something cannot be honoured: op=Adasum, devices, Keras on another backend, optimizers that are wrapped
            already, a memory and an optimizer that would both apply a momentum, specs that differ between ranks, tf.distribute,
            float8, and tracing for jit_compile=True.
        TypeError: An option is unknown.
    """
    shared = Options.from_keywords(
        options,
        device_dense=device_dense,
        device_sparse=device_sparse,
        compression=compression,
        sparse_as_dense=sparse_as_dense,
        gradient_predivide_factor=gradient_predivide_factor,
        op=op,
        backward_passes_per_step=backward_passes_per_step,
        groups=groups or num_groups,
        process_set=process_set,
        scale_local_gradients=scale_local_gradients,
    )
    inner = getattr(optimizer, "inner_optimizer", optimizer)  # of a LossScaleOptimizer
    mixins = mixins_for(optimizer)
    if any(is_wrapped(one) for one in (optimizer, inner)):
        raise ConfigError(f"this {type(optimizer).__name__} is wrapped by DistributedOptimizer already")
    if backward_passes_per_step > 1 and accumulates(inner):
        raise ConfigError("backward_passes_per_step and the optimizer's own gradient_accumulation_steps: give one of them")
    if getattr(inner, "_mesh", None):
        raise ConfigError("an optimizer with a DTensor mesh exchanges its gradients itself")
    takes_over = mixins is not TF_KERAS_LEGACY and inner is optimizer and type(inner).__name__ in ("Adam", "AdamW")
    members = (process_set.rank(), process_set.size())
    shared.choose_defaults("adam" if takes_over and not _has_own_step(inner) else None, members)
    _check_momentum(inner, shared.memory, takes_over)
    if name:
        setattr(inner, "_name" if mixins is TF_KERAS_LEGACY else "name", name)
    accumulator = Accumulator(backward_passes_per_step, average_aggregated_gradients, sparse_as_dense)
    state = WrappedState(Reducer(shared), accumulator, shared.memory != "none")
    if mixins is KERAS_3 or inner is optimizer:
        attach(optimizer, state, *mixins)
    else:  # tf_keras' LossScaleOptimizer lets the inner optimizer exchange, before it decides whether to skip the step
        exchange, *others = mixins
        attach(inner, state, exchange)
        attach(optimizer, state, *others)
    return optimizer


def _check_momentum(optimizer: Any, memory: str | dict | Memory | None, takes_over: bool) -> None:
    """Raises ConfigError where a memory and the optimizer would both apply a momentum. takes_over: whether the optimizer can
    leave its first moment to the memory."""
    momenta = [*map(_momentum_of, (optimizer, *getattr(optimizer, "optimizers", ())))]
    for one in Memories(memory or DEFAULT_MEMORY).all():
        betas = {"betas": (_number(getattr(optimizer, "beta_1", 0.0)), _number(getattr(optimizer, "beta_2", 0.0)))}
        one.check_optimizer(type(optimizer).__name__, max(momenta), "adam" if takes_over else None, betas)
        if one.needs_step and _has_own_step(optimizer):
            raise ConfigError(f"memory {str(one)!r}: amsgrad and jit_compile of the optimizer are not supported")


def _has_own_step(optimizer: Any) -> bool:
    """Whether the optimizer's step is another one than Adam's, or one that XLA compiles."""
    return bool(getattr(optimizer, "amsgrad", False) or getattr(optimizer, "jit_compile", False))


def _momentum_of(optimizer: Any) -> float:
    """The optimizer's momentum, or Adam's beta_1; NaN for one that changes, 0 for none."""
    found = [getattr(optimizer, name, None) for name in ("momentum", "beta_1")]
    return max((_number(one) for one in found if one is not None), default=0.0)


def _number(option: Any) -> float:
    """An option of an optimizer; NaN for one that changes."""
    return math.nan if callable(option) else float(np.asarray(option))


def load_model(
    filepath: str | os.PathLike, custom_objects: dict | None = None, *, keras: ModuleType | None = None, **options: Any
) -> Any:
    """Load a model that was saved with its optimizer, wrapped or plain, and wrap the optimizer to go on with training.

    Args:
        filepath: The file.
        custom_objects: See keras.models.load_model.
        keras: The module that loads, keras or tf_keras; None for tf.keras.
        **options: Those of DistributedOptimizer.

    Returns:
        The model.

    Raises:
        ConfigError: The file has no optimizer.
    """
    model = (keras or tf.keras).models.load_model(filepath, custom_objects=custom_objects)
    if getattr(model, "optimizer", None) is None:
        raise ConfigError(f"{filepath}: the model was saved without an optimizer; compile it with a DistributedOptimizer")
    DistributedOptimizer(model.optimizer, **options)
    return model
