"""A Keras model as the engine of rounds sees it."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import tensorflow as tf

from grace_ext import ConfigError
from grace_ext.exchange.buckets import Tensor
from grace_ext.rounds import Parameters
from grace_ext.rounds.parameters import check_own

from .names import common_names, name_of, unique


class ModelParameters(Parameters):
    """The variables that are trainable now, and the floating-point variables that never are, such as BatchNorm's averages.

    model: of Keras 3 or tf_keras, built. average_buffers: whether those take part.
    """

    def __init__(self, model: Any, average_buffers: bool):
        self._model = model
        trainable = list(model.trainable_variables)
        if not trainable:
            raise ConfigError("the model has no trainable variable")
        for variable in trainable:
            if not tf.as_dtype(variable.dtype).is_floating:
                raise ConfigError(f"variable {name_of(variable)!r} is {variable.dtype}; allowed: real floating point")
        self._variables = dict(zip(unique(common_names([name_of(one) for one in trainable])), trainable, strict=True))
        frozen = {id(one) for layer in model._flatten_layers() for one in _trainable_unless_frozen(layer)}
        others = [one for one in model.non_trainable_weights if id(one) not in frozen]
        self._buffers = [one for one in others if average_buffers and tf.as_dtype(one.dtype).is_floating]
        self._own = {f"buffer {number}": one for number, one in enumerate(others)}

    def tensors(self) -> list[Tensor]:
        shapes = {name: tuple(variable.shape) for name, variable in self._variables.items()}
        return [Tensor(name, int(np.prod(shape)), len(shape), shape=shape) for name, shape in shapes.items()]

    def read(self, name: str, out: np.ndarray) -> None:
        np.copyto(out, _values(self._variables[name]))

    def moved(self, name: str, shared: np.ndarray, out: np.ndarray) -> None:
        variable = self._variables[name]
        start = shared.astype(tf.as_dtype(variable.dtype).as_numpy_dtype).astype(np.float32)
        with np.errstate(invalid="ignore", over="ignore"):  # the engine looks for what is not finite
            np.subtract(start, _values(variable), out=out)

    def check(self) -> None:
        if [*map(id, self._model.trainable_variables)] != [*map(id, self._variables.values())]:
            raise ConfigError(
                "other layers are trainable than when this LocalStepsCallback began: make a new one when layers are frozen or not any "
                "more"
            )

    def are(self, shared: Mapping[str, np.ndarray]) -> bool:
        """Whether variables have these values, float32[n] by name, as their dtypes round them."""
        moves = {name: np.empty(values.size, np.float32) for name, values in shared.items()}
        for name, values in shared.items():
            self.moved(name, values, moves[name])
        return not any(move.any() for move in moves.values())

    def assign(self, name: str, shared: np.ndarray, keep: float) -> None:
        _mix(self._variables[name], shared, keep)

    def copy(self) -> list[np.ndarray]:
        """Of all trainable variables, for `restore`."""
        return [np.array(variable.numpy()) for variable in self._variables.values()]

    def restore(self, copies: list[np.ndarray]) -> None:
        """Return to what `copy` gave."""
        for variable, own in zip(self._variables.values(), copies, strict=True):
            variable.assign(own)

    def read_buffers(self) -> np.ndarray:
        return np.concatenate([np.empty(0, np.float32), *map(_values, self._buffers)])

    def assign_buffers(self, averaged: np.ndarray, keep: float) -> None:
        ends = np.cumsum([int(np.prod(buffer.shape)) for buffer in self._buffers])[:-1]
        for buffer, part in zip(self._buffers, np.split(averaged, ends), strict=True):
            _mix(buffer, part, keep)

    def save_own(self, parameters: bool) -> dict[str, np.ndarray]:
        own = self._own | (self._variables if parameters else {})
        return {name: np.array(variable.numpy()).reshape(-1).view(np.uint8) for name, variable in own.items()}

    def load_own(self, saved: Mapping[str, np.ndarray]) -> None:
        known = self._own | self._variables
        check_own(saved, {name: np.asarray(variable.numpy()).nbytes for name, variable in known.items()})
        for name, content in saved.items():
            dtype = tf.as_dtype(known[name].dtype).as_numpy_dtype
            known[name].assign(np.ascontiguousarray(content).view(dtype).reshape(tuple(known[name].shape)))

    def recovered(self) -> None:
        """Moments that are not finite would spoil the next step again: they begin at zero."""
        variables = self._model.optimizer.variables
        for variable in variables() if callable(variables) else variables:  # a method in tf_keras' legacy optimizers
            values = variable.numpy()
            if tf.as_dtype(variable.dtype).is_floating and not np.isfinite(values).all():
                variable.assign(np.zeros_like(values))


def _trainable_unless_frozen(layer: Any) -> list:
    """The variables that take part in training unless a layer's `trainable` is False, of which no public property tells."""
    return getattr(layer, "_trainable_variables", None) or getattr(layer, "_trainable_weights", None) or []


def _values(variable: Any) -> np.ndarray:
    """float32[n]"""
    return np.asarray(variable.numpy()).reshape(-1).astype(np.float32, copy=False)


def _mix(variable: Any, shared: np.ndarray, keep: float) -> None:
    """In float32, so that all ranks round alike."""
    values = np.float32(keep) * _values(variable) + np.float32(1 - keep) * shared if keep else shared
    variable.assign(values.astype(tf.as_dtype(variable.dtype).as_numpy_dtype).reshape(tuple(variable.shape)))
