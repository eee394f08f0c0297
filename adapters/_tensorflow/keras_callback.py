"""The base of the callbacks for model.fit."""

import functools
import sys
from typing import TYPE_CHECKING, Any

import tensorflow as tf

from .._common.subclassing import subclass


class Callback:
    """Instances are also of the Callback classes of tf.keras and of each Keras that is imported when they are made."""

    model: Any = None
    if TYPE_CHECKING:
        params: dict | None  # Keras sets it

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        return object.__new__(_with_bases(cls, tuple(_callback_classes())))  # type: ignore[arg-type]

    def __init__(self) -> None:
        for base in _callback_classes():
            base.__init__(self)

    def set_model(self, model: Any) -> None:
        self.model = model


def _callback_classes() -> list[Any]:
    imported = [sys.modules[name].callbacks.Callback for name in ("tf_keras", "keras") if name in sys.modules]
    return list(dict.fromkeys([tf.keras.callbacks.Callback, *imported]))


@functools.cache
def _with_bases(cls: type, bases: tuple[type, ...]) -> type:
    return subclass(cls, bases=tuple(base for base in bases if not issubclass(cls, base)))


def native_variable(variable: Any) -> tf.Variable:
    """The tf.Variable in a variable of Keras 3."""
    inner = getattr(variable, "value", None)
    return inner if isinstance(inner, tf.Variable) else variable
