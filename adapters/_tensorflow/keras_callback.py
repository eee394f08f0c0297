"""The base of the callbacks for model.fit."""

import functools
import sys

import tensorflow as tf

from .._common.subclassing import subclass


class Callback:
    """Instances are also of the Callback classes of tf.keras and of each Keras that is imported when they are made."""

    model = None

    def __new__(cls, *args, **kwargs):
        return object.__new__(_with_bases(cls, tuple(_callback_classes())))

    def __init__(self):
        for base in _callback_classes():
            base.__init__(self)

    def set_model(self, model):
        self.model = model


def _callback_classes() -> list[type]:
    imported = [sys.modules[name].callbacks.Callback for name in ("tf_keras", "keras") if name in sys.modules]
    return list(dict.fromkeys([tf.keras.callbacks.Callback, *imported]))


@functools.cache
def _with_bases(cls, bases) -> type:
    return subclass(cls, bases=tuple(base for base in bases if not issubclass(cls, base)))


def native_variable(variable) -> tf.Variable:
    """The tf.Variable in a variable of Keras 3."""
    return variable if isinstance(variable, tf.Variable) else getattr(variable, "value", variable)
